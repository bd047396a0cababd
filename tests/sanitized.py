"""Runs a program under a sanitizer's runtime and fails if there is a report: --run_under of --config=asan and =tsan.

Python itself is not instrumented: the runtime is loaded before it, and libstdc++ with it, or it finds no exceptions.
Reports go to files, as pytest hides what is printed, and so do the processes that tests start.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

RUNTIMES = {"asan": "libasan.so.8", "tsan": "libtsan.so.2"}  # gcc 12 and newer
# Of ThreadSanitizer only what instrumented code does. Python and jaxlib keep memory until the end: no leaks are told.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:exitcode=0"}


def main() -> int:
    """The program's exit code, or 1 when that is 0 and there are reports."""
    suppressions = Path(__file__).parent.parent / ".ci" / "tsan.supp"
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as folder:
        log = f"log_path={folder}/report"
        environment = dict(os.environ)
        environment["LD_PRELOAD"] = f"{RUNTIMES[os.environ['MOONEP_SANITIZER']]} libstdc++.so.6"
        environment["ASAN_OPTIONS"] = f"{OPTIONS['ASAN_OPTIONS']}:{log}"
        environment["TSAN_OPTIONS"] = f"{OPTIONS['TSAN_OPTIONS']}:{log}:suppressions={suppressions.absolute()}"
        environment["UBSAN_OPTIONS"] = f"print_stacktrace=1:{log}"
        # Older runtimes find no room for their tables among the random addresses of newer kernels.
        fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
        code = subprocess.run([*fixed, *sys.argv[1:]], env=environment, check=False).returncode
        reports = [file for file in sorted(Path(folder).iterdir()) if file.stat().st_size]
        for file in reports:
            print(f"--- {file.name}", *file.read_text(errors="replace").splitlines()[:150], sep="\n")
    return code or bool(reports)


if __name__ == "__main__":
    sys.exit(main())
