"""Repository rule: what the targets need of a Python environment, $MOONEP_PYTHON or else the first python3 in PATH.

It must hold jaxlib (whose FFI headers are used) and nanobind; and what a Python target imports, since programs run with
this Python. It must not hold the project itself.
"""

_PROBE = """
import importlib.util as u, json, os, sys, sysconfig
def root(m):
    spec = u.find_spec(m)
    if spec is None:
        sys.exit("no module named " + m)
    return os.path.dirname(spec.origin)
print(json.dumps({
    "executable": sys.executable,
    "python_include": sysconfig.get_path("include"),
    "xla_include": os.path.join(root("jaxlib"), "include"),
    "nanobind": root("nanobind"),
    "packages": sysconfig.get_path("purelib"),
}))
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(name = "python_headers", hdrs = glob(["python_include/**/*.h"]), includes = ["python_include"])

cc_library(name = "xla_ffi_headers", hdrs = glob(["xla_include/xla/ffi/**/*.h"]), includes = ["xla_include"])

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    textual_hdrs = glob(["nanobind/src/*.h", "nanobind/src/*.cpp", "nanobind/ext/robin_map/include/**/*.h"]),
    copts = ["-std=c++17", "-O2", "-DNDEBUG", "-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    deps = [":python_headers"],
)

py_runtime(name = "runtime", interpreter_path = "{python}", python_version = "PY3", stub_shebang = "#!{python}")

py_runtime_pair(name = "runtime_pair", py3_runtime = ":runtime")
"""

def _python_env_impl(rctx):
    python = rctx.os.environ.get("MOONEP_PYTHON", "") or str(rctx.which("python3"))
    probe = rctx.execute([python, "-c", _PROBE])
    if probe.return_code:
        fail("%s lacks what the build needs (jaxlib, nanobind), set MOONEP_PYTHON to a Python that has it: %s" %
             (python, probe.stderr))
    info = json.decode(probe.stdout)
    for key in ["python_include", "xla_include", "nanobind"]:
        rctx.symlink(info[key], key)
    rctx.file("BUILD.bazel", _BUILD.replace("{python}", info["executable"]))

    # Some bootstraps of rules_python run the interpreter behind a virtual environment, which loses its packages.
    rctx.file("defs.bzl", "PYTHON_PACKAGES = \"%s\"\n" % info["packages"])

python_env = repository_rule(implementation = _python_env_impl, environ = ["MOONEP_PYTHON", "PATH"], local = True)
