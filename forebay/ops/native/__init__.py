"""The native ops on the CPU: calls of the compiled kernels, which `cpu/` has in C++."""
