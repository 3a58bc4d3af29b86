"""CUDA's driver without a GPU: a library of its name, with as many GPUs as an environment variable says."""

import subprocess
from pathlib import Path

GPUS = "STANDIN_GPUS"
"""Place on the PCI bus and model of each, e.g. ``0000:3B:00.0 NVIDIA A;0000:AF:00.0 NVIDIA A``; ``broken``: none
starts."""

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>

static const char* of(int device) {
    const char* at = getenv("STANDIN_GPUS");
    while (device-- > 0) at = strchr(at, ';') + 1;
    return at;
}
static int copy(char* to, const char* from, size_t length, int room) {
    if ((int)length >= room) return 1;
    memcpy(to, from, length);
    to[length] = 0;
    return 0;
}
int cuInit(unsigned flags) { return flags ? 1 : strcmp(getenv("STANDIN_GPUS"), "broken") ? 0 : 999; }
int cuGetErrorString(int status, const char** text) { *text = "unknown error"; return status != 999; }
int cuDriverGetVersion(int* version) { *version = 12080; return 0; }
int cuDeviceGetCount(int* count) {
    *count = *of(0) != 0;
    for (const char* at = of(0); *at; at++) *count += *at == ';';
    return 0;
}
int cuDeviceGet(int* device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetName(char* name, int room, int device) {
    const char* at = strchr(of(device - 100), ' ') + 1;
    return copy(name, at, strcspn(at, ";"), room);
}
int cuDeviceGetPCIBusId(char* id, int room, int device) {
    return copy(id, of(device - 100), strcspn(of(device - 100), " "), room);
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) { memset(uuid, device, 16); return 0; }
"""


def build(folder: Path) -> Path:
    """Compile it into ``folder``, which may stand in LD_LIBRARY_PATH; the file."""
    library = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=_SOURCE, text=True, check=True)
    return library
