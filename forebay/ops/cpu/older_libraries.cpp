// What g++'s headers call of newer C and C++ libraries, so that the kernels run with those of 2018 (glibc 2.28), which
// wheels promise (ops/compiler.py). Hidden: only these kernels use them.
#include <new>

extern "C" {
// Of glibc 2.32: whether reference counts need no atomic instructions.
[[gnu::visibility("hidden")]] char __libc_single_threaded = 0;
}

namespace std {
// Of GCC 11.
[[noreturn, gnu::visibility("hidden")]] void __throw_bad_array_new_length() { throw std::bad_alloc(); }
}  // namespace std
