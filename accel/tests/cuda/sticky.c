// SPDX-License-Identifier: Apache-2.0 OR MIT
// Says what calls answer before and after a loss of the device: the program waits for a line of its standard input in between, and has a
// capture under way if an argument says so.
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void say(const char *call, CUresult code)
{
	const char *text = "?";
	cuGetErrorName(code, &text);
	printf("%s: %s\n", call, text);
}

int main(int count, char **arguments)
{
	char bytes[64] = {0};
	CUdevice device;
	CUcontext context;
	CUstream stream;
	CUevent event;
	CUdeviceptr memory, more;
	size_t free, total;
	if (cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context))
		return 1;
	if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) || cuEventCreate(&event, 0) || cuMemAlloc(&memory, 4096))
		return 1;
	say("synchronize", cuCtxSynchronize());
	if (count > 1 && !strcmp(arguments[1], "capture")) {
		say("capture", cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
		say("captured", cuMemsetD8Async(memory, 1, 4096, stream));
	}
	puts("ready");
	fflush(stdout);
	if (!fgets(bytes, sizeof bytes, stdin))
		return 2;
	say("synchronize", cuCtxSynchronize());
	say("synchronize", cuCtxSynchronize());
	say("allocate", cuMemAlloc(&more, 4096));
	say("copy", cuMemcpyHtoD(memory, bytes, sizeof bytes));
	say("copy back", cuMemcpyDtoH(bytes, memory, sizeof bytes));
	say("record", cuEventRecord(event, stream));
	say("wait for it", cuEventSynchronize(event));
	say("memory", cuMemGetInfo(&free, &total));
	say("free", cuMemFree(memory));
	return 0;
}
