"""`python -m moonep_jax doctor`: what this node is, what works on it, what does not, and what to do.

Works on CPUs and GPUs, for one process or, started once per process, for all of a job (--coordinator, --processes and
--process, or --cluster); process 0 then prints one table. Exit code: 0 usable, 1 not. It changes nothing.

JSON (--json), stable within a `schema`; new rows and new keys may be added:

    {"schema": 1, "usable": bool, "processes": [process, ...]}
    process: {"process": int, "host": str, "pid": int, "platform": "cpu" | "gpu" | "", "devices": [JAX device ids],
              "usable": bool, "rows": [row, ...]}
    row: {"name": str, "status": "ok" | "info" | "warning" | "failure", "value": text for a person,
          "fix": what to do (never empty for a failure), "where": "" | "device 3" | "devices 0-1", "data": {...}}

Rows and their `data` ({} where a row could not be made):

    versions        moonep_jax, jax, jaxlib, python, kernel, machine: str
    FFI             module, jaxlib: [major, minor] of XLA's FFI, or null
    environment     changed: {variable: value}, MOONEP_ variables that are not at their defaults
    devices         platform, kind, client: str; devices: [int]
    cores           usable, all: int
    host memory     host_free, cgroup_free: bytes
    open files      soft, hard: limits
    memfd, futex    works: bool, error: str
    CUDA            driver, module_runtime: 1000*major + 10*minor; nvml_driver: str, "" without NVML
    IMEX channels   channels, usable: [str]
    GPU             ordinal, free_bytes, total_bytes: int; name, pci: str; compute: [major, minor]. On CPUs: used: false
    memory handles  vmm, multicast: bool (attributes); fd, fabric: {"attribute": bool, "works": bool, "error": str};
                    `works` is a trial: allocated and exported here, imported and read in a second process
    link            devices: [a, b]; access, atomics, nvml: bool; rank: int; type: str
    unix sockets, pidfd_getfd   works: bool, error: str: whether a second process got a descriptor that way
    handle kind     requested: "auto" | "fd" | "fabric"; kind: "fd" | "fabric" | null between processes;
                    one_process: "local"; error: str
    selftest        passed: bool, wrong: [op], seconds: float
    backend, processes   failures only
"""
