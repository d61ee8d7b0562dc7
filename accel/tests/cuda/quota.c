// SPDX-License-Identifier: Apache-2.0 OR MIT
// Says what a client may have of a device, and takes more. Arguments: MiB to take at once.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

static const char *name(CUresult code) {
	const char *text = "?";
	cuGetErrorName(code, &text);
	return text;
}

int main(int count, char **arguments) {
	size_t each = (size_t)atoi(arguments[count - 1]) << 20, free, total;
	CUdevice device;
	CUcontext context;
	CUdeviceptr memory[64], more;
	printf("before cuInit: %s\n", name(cuDeviceGet(&device, 0)));
	if (cuInit(0) != CUDA_SUCCESS || cuDeviceGet(&device, 0) != CUDA_SUCCESS)
		return 1;
	printf("without a context: %s\n", name(cuMemAlloc(&more, 4096)));
	cuDevicePrimaryCtxRetain(&context, device);
	cuCtxSetCurrent(context);
	cuMemGetInfo(&free, &total);
	printf("%zu of %zu MiB\n", free >> 20, total >> 20);
	int taken = 0;
	while (taken < 64 && cuMemAlloc(&memory[taken], each) == CUDA_SUCCESS)
		taken++;
	cuMemGetInfo(&free, &total);
	printf("%d allocations, %zu MiB left, then %s\n", taken, free >> 20, name(cuMemAlloc(&more, each)));
	cuMemFree(memory[--taken]);
	printf("freed: %s\n", name(cuMemAlloc(&more, each)));
	const char *once = name(cuMemFree(more));
	printf("freed twice: %s, %s\n", once, name(cuMemFree(more)));
	printf("inside: %s\n", name(cuMemFree(memory[0] + 16)));
	char bytes[64] = {0};
	printf("beyond the end: %s\n", name(cuMemcpyHtoD(memory[0] + each - 32, bytes, 64)));
	printf("memory of this process: %s\n", name(cuMemcpyHtoD((CUdeviceptr)(size_t)bytes, bytes, 64)));
	printf("nothing: %s\n", name(cuMemsetD8(memory[0], 1, 0)));
	void *function;
	CUdriverProcAddressQueryResult found;
	cuGetProcAddress("cuMemAlloc", &function, 12090, 0, &found);
	printf("found: %d %d\n", function == (void *)cuMemAlloc, found);
	cuGetProcAddress("cuNothing", &function, 12090, 0, &found);
	printf("found: %d %d\n", function == NULL, found);
	printf("not forwarded: %s\n", name(cuMemAllocManaged(&more, 4096, CU_MEM_ATTACH_GLOBAL)));
	cuDevicePrimaryCtxRelease(device);
	printf("released: %s\n", name(cuMemAlloc(&more, 4096)));
	return 0;
}
