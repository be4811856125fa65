// The part of libcuda that Triton's launcher calls, for a machine without a GPU: a launch notes what it was given.

#include <cuda.h>
#include <string.h>

#define MOST 128

int stub_launches;
int stub_error;       // what the next launches return
int stub_error_once;  // what the next launch returns
int stub_sizes[MOST];  // bytes of each kernel parameter, 0 after the last; set by the test
unsigned char stub_parameters[MOST][128];
unsigned stub_grid[3];
unsigned long stub_config[8];  // block, shared memory, stream, function, number of attributes, the first one and its value

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **parameters, void **extra) {
  int once = stub_error_once;
  stub_error_once = 0;
  if (stub_error || once) return stub_error ? stub_error : once;
  stub_launches++;
  stub_grid[0] = config->gridDimX, stub_grid[1] = config->gridDimY, stub_grid[2] = config->gridDimZ;
  CUlaunchAttribute none = {0}, first = config->numAttrs ? config->attrs[0] : none;
  unsigned long noted[8] = {config->blockDimX, (unsigned long)config->blockDimY << 32 | config->blockDimZ, config->sharedMemBytes,
                            (unsigned long)config->hStream, (unsigned long)f, config->numAttrs, first.id,
                            first.value.programmaticStreamSerializationAllowed};
  memcpy(stub_config, noted, sizeof noted);
  memset(stub_parameters, 0, sizeof stub_parameters);
  for (int i = 0; i < MOST && stub_sizes[i]; i++) memcpy(stub_parameters[i], parameters[i], stub_sizes[i]);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *shape,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element, CUtensorMapInterleave i,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  cuuint64_t *words = (cuuint64_t *)map;
  memset(map, 0, sizeof *map);
  words[0] = (cuuint64_t)address, words[1] = type, words[2] = rank, words[3] = swizzle;
  for (unsigned d = 0; d < rank; d++) words[4 + d] = shape[d], words[9 + d] = box[d];
  for (unsigned d = 0; d + 1 < rank; d++) words[14 - d] += strides[d];
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) { return *value = 232448, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  return *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "stub", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return *device = index, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) { return *f = (CUfunction)1, CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)1, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return *status = 0, CUDA_SUCCESS; }
