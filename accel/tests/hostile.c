// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Arguments that are no objects where a kernel takes one: refused, and the program goes on. Natively each of these would end it. */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
	const char *source = "typedef sampler_t disguised;\n"
			     "kernel void a(global int *to, read_only image2d_t image, sampler_t s, ulong n, disguised d, constant int *from)"
			     "{ to[0] = n == 0; }";
	cl_platform_id platform;
	cl_device_id device;
	cl_int code;

	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, NULL, &code);
	cl_mem buffer = clCreateBuffer(context, 0, 64, NULL, &code);
	cl_sampler sampler = clCreateSampler(context, CL_FALSE, CL_ADDRESS_NONE, CL_FILTER_NEAREST, &code);
	/* Built from its source, and from a binary, of which the driver tells nothing unless it is asked when it builds. */
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	for (int built = 0; built < 2; built++) {
		uintptr_t values[] = {0x414141414141, (uintptr_t)&code, (uintptr_t)context, (uintptr_t)sampler, UINTPTR_MAX};
		printf("built %d\n", clBuildProgram(program, 0, NULL, "", NULL, NULL));
		cl_kernel kernel = clCreateKernel(program, "a", &code);
		for (cl_uint i = 0; i < 6; i++) {
			printf("argument %u:", i);
			for (int k = 0; k < 5; k++)
				printf(" %d", clSetKernelArg(kernel, i, 8, &values[k]));
			printf(" %d\n", clSetKernelArg(kernel, i, 8, i == 2 ? (void *)&sampler : &buffer));
		}
		printf("finish %d\n", clFinish(queue));
		size_t length;
		clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof length, &length, NULL);
		unsigned char *binary = malloc(length);
		clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof binary, &binary, NULL);
		clReleaseKernel(kernel);
		clReleaseProgram(program);
		program = clCreateProgramWithBinary(context, 1, &device, &length, (const unsigned char **)&binary, NULL, &code);
		free(binary);
	}
	return 0;
}
