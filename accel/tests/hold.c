// SPDX-License-Identifier: Apache-2.0 OR MIT
/* hold MEGABYTES: allocates a buffer, says the API's code, and keeps the buffer until its input ends. */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	cl_platform_id platform;
	cl_device_id device;
	cl_context context;
	cl_command_queue queue;
	cl_mem buffer;
	cl_int code;

	if (argc < 2 || clGetPlatformIDs(1, &platform, NULL) || clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL))
		return 2;
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	if (code)
		return 3;
	queue = clCreateCommandQueue(context, device, 0, &code);
	if (code)
		return 4;
	buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, (size_t)atoi(argv[1]) << 20, NULL, &code);
	/* The failure of a creation that is sure to succeed as far as the client knows is told then. */
	if (!code)
		code = clFinish(queue);
	printf("%d\n", code);
	fflush(stdout);
	if (code)
		return 1;
	while (getchar() != EOF)
		;
	return clReleaseMemObject(buffer) || clReleaseCommandQueue(queue) || clReleaseContext(context);
}
