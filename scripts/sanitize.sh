#!/bin/sh
# Builds tests/native/sanitized.cpp with the native sources and runs it, once with the address, leak and
# undefined-behaviour sanitizers and once with the thread sanitizer. Any finding ends it with an error.
#
#   scripts/sanitize.sh
#
# CXX chooses the compiler (default c++). io_uring is included where liburing can be linked.
set -eu

cd "$(dirname "$0")/.."
cxx=${CXX:-c++}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# What Python sees is tested by tests/native; here only what needs no Python.
sources=$(find csrc -name '*.cpp' ! -name '*bindings.cpp' | sort)
uring=""
printf '#include <liburing.h>\nint main() { return io_uring_queue_init(2, nullptr, 0); }\n' >"$scratch/probe.cpp"
for library in -l:liburing.a -luring; do
    if "$cxx" "$scratch/probe.cpp" -o "$scratch/probe" "$library" 2>/dev/null; then
        uring="-DZEROSHARDER_HAVE_LIBURING=1 $library"
        break
    fi
done

export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
for kind in address,undefined thread; do
    echo "== $kind"
    # The words of $sources and $uring are meant to be split. Libraries come after what uses them.
    # shellcheck disable=SC2086
    printf '%s\n' $sources tests/native/sanitized.cpp | xargs -P "$(nproc)" -I{} sh -c \
        '"$1" -std=c++17 -O1 -g -fno-omit-frame-pointer -Wall -Wextra -fsanitize="$2" -fno-sanitize-recover=all \
        -pthread -Icsrc $4 -c "$5" -o "$3/$(echo "$5" | tr / _).o"' - "$cxx" "$kind" "$scratch" "${uring%% -l*}" {}
    # shellcheck disable=SC2086
    "$cxx" -fsanitize="$kind" -pthread "$scratch"/*.o -o "$scratch/sanitized" ${uring#-D* }
    "$scratch/sanitized" "$scratch"
    rm "$scratch"/*.o
done
