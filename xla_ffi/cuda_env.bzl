"""Repository rule: the CUDA toolkit of this machine, if it has one: $CUDA_HOME, that of nvcc in PATH, /usr/local/cuda.

With MOONEP_CUDA=0, or where there is none, targets that need it are incompatible: Bazel skips them.
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(name = "headers", hdrs = glob(["include/**"]), includes = ["include"])

# No libcuda: the module imports on a machine without a driver.
cc_library(
    name = "cudart_static",
    srcs = ["lib/libcudart_static.a"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
    deps = [":headers"],
)
"""

_NO_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

[
    cc_library(name = name, target_compatible_with = ["@platforms//:incompatible"])
    for name in ["headers", "cudart_static"]
]
"""

# Of an nvcc, which may be a link or a wrapper script, where its toolkit is.
_WHERE = "{nvcc} --dryrun -c x.cu 2>&1 | sed -n 's/^#$ TOP=//p'"

def _toolkit(rctx):
    homes = []
    if rctx.os.environ.get("CUDA_HOME", ""):
        homes.append(rctx.os.environ["CUDA_HOME"])
    elif rctx.which("nvcc"):
        where = rctx.execute(["sh", "-c", _WHERE.format(nvcc = rctx.which("nvcc"))]).stdout.strip()
        if where:
            homes.append(where)
    homes.append("/usr/local/cuda")
    for home in homes:
        root = rctx.path(home)
        for lib in ["lib64", "lib"]:
            cudart = root.get_child(lib).get_child("libcudart_static.a")
            nvcc = root.get_child("bin").get_child("nvcc")
            if nvcc.exists and cudart.exists:
                return struct(root = root.realpath, nvcc = nvcc.realpath, cudart = cudart.realpath)
    return None

def _cuda_env_impl(rctx):
    toolkit = None if rctx.os.environ.get("MOONEP_CUDA", "1") == "0" else _toolkit(rctx)
    if not toolkit:
        rctx.file("BUILD.bazel", _NO_BUILD)
        rctx.file("defs.bzl", "HAVE_CUDA = False\nNVCC = \"\"\n")
        return
    rctx.symlink(toolkit.root.get_child("include"), "include")
    rctx.symlink(toolkit.cudart, "lib/libcudart_static.a")
    rctx.file("BUILD.bazel", _BUILD)
    rctx.file("defs.bzl", "HAVE_CUDA = True\nNVCC = \"%s\"\n" % toolkit.nvcc)

cuda_env = repository_rule(
    implementation = _cuda_env_impl,
    environ = ["CUDA_HOME", "MOONEP_CUDA", "PATH"],
    local = True,
)
