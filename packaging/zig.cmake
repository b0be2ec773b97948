# Compiles for another architecture, and for an older glibc than that of this machine. The C++ library is linked in.
#   -DZIG=...: the compiler, of the package `ziglang`; -DZIG_TARGET=aarch64-linux-gnu.2.28;
#   -DZIG_INCLUDE=...: a folder of headers, where there are others than the compiler's and glibc's
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX REPLACE "-.*" "" CMAKE_SYSTEM_PROCESSOR "${ZIG_TARGET}")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG ZIG_TARGET ZIG_INCLUDE)
set(CMAKE_C_COMPILER ${ZIG} cc -target ${ZIG_TARGET})
set(CMAKE_CXX_COMPILER ${ZIG} c++ -target ${ZIG_TARGET})
# Without optimization it would add a sanitizer, and trap.
set(CMAKE_C_FLAGS_INIT -fno-sanitize=undefined)
if(ZIG_INCLUDE)
  string(APPEND CMAKE_C_FLAGS_INIT " -isystem ${ZIG_INCLUDE}")
endif()
if(CMAKE_SYSTEM_PROCESSOR STREQUAL aarch64)
  string(APPEND CMAKE_C_FLAGS_INIT " -include ${CMAKE_CURRENT_LIST_DIR}/glibc_memory.h")
endif()
set(CMAKE_CXX_FLAGS_INIT "${CMAKE_C_FLAGS_INIT}")
# Without symbols. The `strip` of this machine knows no other architecture.
set(CMAKE_SHARED_LINKER_FLAGS_INIT -s)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -s)
