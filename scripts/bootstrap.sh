#!/bin/sh
# Makes a virtual environment with zerosharder (editable) and everything needed to test it, at pinned versions.
#
#   scripts/bootstrap.sh [FOLDER]      FOLDER defaults to .venv
#
# Safe to run again. PYTHON chooses the interpreter (default python3). System packages are installed only if
# something is missing, only by root, and only where apt-get exists; otherwise the command to run is printed.
set -eu

cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}

say() { printf '%s\n' "bootstrap: $*" >&2; }

# apt_install PACKAGE... : status 0 if installed now.
apt_install() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        return 1
    fi
    say "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y --no-install-recommends "$@" >&2 && return 0
    # The package index of a fresh machine is empty or old.
    apt-get update >&2 && apt-get install -y --no-install-recommends "$@" >&2
}

can_make_venv() { "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; }

can_build() {
    command -v "${CXX:-g++}" >/dev/null 2>&1 &&
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1
}

if ! command -v "$python" >/dev/null 2>&1; then
    apt_install python3 python3-venv || { say "python3 not found; run: sudo apt-get install python3 python3-venv"; exit 1; }
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    say "Python 3.10 or newer is needed, $python is $("$python" -V 2>&1); set PYTHON to another interpreter"
    exit 1
fi
if [ ! -x "$venv/bin/python" ] && ! can_make_venv; then
    apt_install python3-venv || true
    can_make_venv || { say "$python cannot make virtual environments; run: sudo apt-get install python3-venv"; exit 1; }
fi
if [ "${ZEROSHARDER_BUILD_EXT:-1}" != 0 ] && ! can_build; then
    apt_install python3-dev g++ || true
    can_build || say "no C++ compiler or no Python headers: going on without the native extension." \
        "To have it, run: sudo apt-get install g++ python3-dev, then: make clean, and this again"
fi
# File I/O by io_uring; without the headers it goes through threads.
[ -e /usr/include/liburing.h ] || ! can_build || apt_install liburing-dev || true
# For benchmarks/ that shape the network; everything else works without.
command -v ip >/dev/null 2>&1 || apt_install iproute2 || true

# A folder left by an interrupted attempt has a python but no pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Build tools first and no isolation after, so that they are the pinned ones too.
pip install --quiet -c constraints.txt setuptools pybind11
pip install --quiet --no-build-isolation -c constraints.txt --editable '.[test,dev]'
"$venv/bin/python" -m zerosharder doctor >&2
