// SPDX-License-Identifier: Apache-2.0 OR MIT
// A kernel compiled at run time, loaded and launched by the driver API; images that no driver takes, and what its log says of them.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Of nvrtc.h, which is the same for 12 and 13.
typedef struct _nvrtcProgram *nvrtcProgram;
int nvrtcCreateProgram(nvrtcProgram *, const char *, const char *, int, const char *const *, const char *const *);
int nvrtcCompileProgram(nvrtcProgram, int, const char *const *);
int nvrtcGetPTXSize(nvrtcProgram, size_t *);
int nvrtcGetPTX(nvrtcProgram, char *);

#define OK(call)                                                              \
	do {                                                                  \
		int code = (call);                                            \
		if (code) {                                                   \
			printf("%d: %s: %d\n", __LINE__, #call, code);        \
			exit(1);                                              \
		}                                                             \
	} while (0)
#define CLAIM(condition)                                                      \
	do {                                                                  \
		if (!(condition)) {                                           \
			printf("%d: not so: %s\n", __LINE__, #condition);     \
			exit(1);                                              \
		}                                                             \
	} while (0)

static const char source[] = "extern \"C\" __global__ void saxpy(float a, const float *x, float *y, unsigned long long n) {\n"
			     "  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)\n"
			     "    y[i] = a * x[i] + y[i];\n"
			     "}\n";

static char *compiled(void)
{
	const char *options[] = {"--gpu-architecture=compute_90"};
	nvrtcProgram program;
	size_t size;

	OK(nvrtcCreateProgram(&program, source, "saxpy.cu", 0, NULL, NULL));
	OK(nvrtcCompileProgram(program, 1, options));
	OK(nvrtcGetPTXSize(program, &size));
	char *ptx = malloc(size);
	OK(nvrtcGetPTX(program, ptx));
	return ptx;
}

static void refused(void)
{
	CUmodule module;
	char log[256] = "";
	CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
	void *values[] = {log, (void *)sizeof log};
	const char elf[64] = "\x7f"
			     "ELF";

	const char wrong[] = ".version 8.0\n.target sm_80\n.address_size 64\n.entry k() { nonsense; }";

	CLAIM(cuModuleLoadDataEx(&module, wrong, 2, options, values) == CUDA_ERROR_INVALID_PTX);
	CLAIM(strstr(log, "line 4"));
	CLAIM(cuModuleLoadDataEx(&module, elf, 2, options, values) == CUDA_ERROR_NO_BINARY_FOR_GPU);
	CLAIM(strstr(log, "compute capability"));
	CLAIM(cuModuleLoad(&module, "/nonexistent.ptx") == CUDA_ERROR_FILE_NOT_FOUND);
}

int main(void)
{
	enum { n = 5000 };
	static float x[n], y[n];
	CUdevice device;
	CUcontext context;
	CUmodule module;
	CUfunction function;
	CUdeviceptr dx, dy;
	float a = 2;
	unsigned long long count = n;
	const char *name;

	CLAIM(cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED);
	OK(cuInit(0));
	OK(cuDeviceGet(&device, 0));
	CLAIM(cuCtxSynchronize() == CUDA_ERROR_INVALID_CONTEXT);
	OK(cuDevicePrimaryCtxRetain(&context, device));
	OK(cuCtxPushCurrent(context));
	refused();
	OK(cuModuleLoadData(&module, compiled()));
	OK(cuModuleGetFunction(&function, module, "saxpy"));
	CLAIM(cuModuleGetFunction(&function, module, "other") == CUDA_ERROR_NOT_FOUND);
	for (int i = 0; i < n; i++) {
		x[i] = i;
		y[i] = 1;
	}
	OK(cuMemAlloc(&dx, sizeof x));
	OK(cuMemAlloc(&dy, sizeof y));
	OK(cuMemcpyHtoD(dx, x, sizeof x));
	OK(cuMemcpyHtoD(dy, y, sizeof y));
	void *arguments[] = {&a, &dx, &dy, &count};
	OK(cuLaunchKernel(function, 7, 1, 1, 128, 1, 1, 0, NULL, arguments, NULL));
	// The same again, with all arguments in one buffer.
	struct {
		float a;
		CUdeviceptr x, y;
		unsigned long long n;
	} buffer = {a, dx, dy, n};
	size_t size = sizeof buffer;
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
	OK(cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, NULL, NULL, extra));
	OK(cuMemcpyDtoH(y, dy, sizeof y));
	for (int i = 0; i < n; i++)
		CLAIM(y[i] == 4.0f * i + 1);
	CLAIM(cuLaunchKernel(function, 1, 1, 1, 2048, 1, 1, 0, NULL, arguments, NULL) == CUDA_ERROR_INVALID_VALUE);
	CLAIM(cuMemFree(dx + 4) == CUDA_ERROR_INVALID_VALUE);
	CLAIM(cuModuleGetFunction(&function, (CUmodule)12345, "saxpy") == CUDA_ERROR_INVALID_HANDLE);
	OK(cuGetErrorName(CUDA_ERROR_INVALID_HANDLE, &name));
	CLAIM(!strcmp(name, "CUDA_ERROR_INVALID_HANDLE"));
	OK(cuMemFree(dx));
	OK(cuMemFree(dy));
	OK(cuModuleUnload(module));
	OK(cuDevicePrimaryCtxRelease(device));
	puts("ok");
}
