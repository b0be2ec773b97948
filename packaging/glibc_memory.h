// Included first in every file that Zig compiles for aarch64. Zig's runtime, which is linked in for other functions
// there, has slower ones of these names, and they would be taken: a name with a version is glibc's.
__asm__(".symver memcpy, memcpy@GLIBC_2.17");
__asm__(".symver memmove, memmove@GLIBC_2.17");
__asm__(".symver memset, memset@GLIBC_2.17");
