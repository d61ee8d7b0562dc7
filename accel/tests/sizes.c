// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Arguments whose size is wrong, at the end of the memory that there is: the driver compares sizes before it reads. */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

int main(void)
{
	const char *source = "typedef struct { int n[8]; } record;\n"
			     "kernel void a(global int *to, int n, record r, local int *l, float16 f) { to[0] = n + r.n[7] + l[0] + f.s3; }";
	const size_t sizes[] = {9, 16, 32, 64, 4096, 65536};
	cl_platform_id platform;
	cl_device_id device;
	cl_int code;

	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	clBuildProgram(program, 0, NULL, "", NULL, NULL);
	cl_kernel kernel = clCreateKernel(program, "a", &code);
	char *pages = mmap(NULL, 2 * 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(pages + 65536, 65536);
	/* Twice: what was refused is asked again, what was taken isn't. */
	for (int round = 0; round < 2; round++)
		for (cl_uint i = 0; i < 6; i++) {
			printf("argument %u:", i);
			for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
				/* A value of the right size, where there is one, else of 8 bytes. Of records PoCL doesn't know the size, and takes any. */
				size_t has = i == 2 || (i == 4 && sizes[k] == 64) ? sizes[k] : 8;
				printf(" %d", clSetKernelArg(kernel, i, sizes[k], pages + 65536 - has));
			}
			printf("\n");
		}
	return 0;
}
