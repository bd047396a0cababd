"""Rule that compiles one .cu file with nvcc to a position-independent object, for the architectures of CMakeLists.txt."""

load("@moonep_cuda//:defs.bzl", "HAVE_CUDA", "NVCC")
load("@rules_cc//cc:defs.bzl", "CcInfo")

# For target_compatible_with: without a CUDA toolkit, targets are skipped.
CUDA_COMPATIBLE = [] if HAVE_CUDA else ["@platforms//:incompatible"]

# Machine code for Hopper and for Blackwell, and PTX for what comes after.
_ARCHITECTURES = ["arch=compute_90,code=sm_90", "arch=compute_100,code=[sm_100,compute_100]"]

def _cuda_object_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".pic.o")
    contexts = [d[CcInfo].compilation_context for d in ctx.attr.deps]
    args = ctx.actions.args()
    args.add_all(["-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC,-fvisibility=hidden"])
    args.add_all(_ARCHITECTURES, format_each = "--generate-code=%s")
    args.add("-I", ctx.label.workspace_root or ".")
    for context in contexts:
        args.add_all(context.includes, before_each = "-isystem")
        args.add_all(context.system_includes, before_each = "-isystem")
    args.add("-c", ctx.file.src)
    args.add("-o", out)
    ctx.actions.run(
        executable = NVCC,
        arguments = [args],
        inputs = depset([ctx.file.src], transitive = [c.headers for c in contexts]),
        outputs = [out],
        mnemonic = "NvccCompile",
        progress_message = "Compiling %s with nvcc" % ctx.file.src.short_path,
        use_default_shell_env = True,  # nvcc looks for the host compiler in PATH
    )
    return DefaultInfo(files = depset([out]))

cuda_object = rule(
    implementation = _cuda_object_impl,
    attrs = {
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "deps": attr.label_list(providers = [CcInfo]),
    },
)
