// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Fills device memory, gives it up, asks for as much again, and counts the bytes that it finds of what was there. */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 8, SIDE = 256 };

static unsigned long found(const unsigned char *p, size_t n)
{
	unsigned long stale = 0;
	for (size_t i = 0; i < n; i++)
		stale += p[i] != 0;
	return stale;
}

int main(void)
{
	static const size_t sizes[] = {4096, 1000000, 1000003};
	static unsigned char data[1000003];
	cl_platform_id platform;
	cl_device_id device;

	if (clGetPlatformIDs(1, &platform, NULL) || clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL))
		return 1;
	cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, NULL);
	cl_command_queue queue = clCreateCommandQueue(context, device, 0, NULL);
	for (int s = 0; s < 3; s++) {
		unsigned long stale = 0;
		for (int i = 0; i < ROUNDS; i++) {
			cl_mem buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, sizes[s], NULL, NULL);
			if (clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, sizes[s], data, 0, NULL, NULL))
				return 1;
			stale += found(data, sizes[s]);
			memset(data, 0xa5, sizes[s]);
			clEnqueueWriteBuffer(queue, buffer, CL_TRUE, 0, sizes[s], data, 0, NULL, NULL);
			clFinish(queue);
			clReleaseMemObject(buffer);
		}
		printf("%zu: %lu stale\n", sizes[s], stale);
	}
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = SIDE, .image_height = SIDE};
	size_t origin[3] = {0}, region[3] = {SIDE, SIDE, 1};
	unsigned long stale = 0;
	for (int i = 0; i < ROUNDS; i++) {
		cl_mem image = clCreateImage(context, CL_MEM_READ_WRITE, &format, &desc, NULL, NULL);
		if (clEnqueueReadImage(queue, image, CL_TRUE, origin, region, 0, 0, data, 0, NULL, NULL))
			return 1;
		stale += found(data, SIDE * SIDE * 4);
		memset(data, 0xa5, SIDE * SIDE * 4);
		clEnqueueWriteImage(queue, image, CL_TRUE, origin, region, 0, 0, data, 0, NULL, NULL);
		clFinish(queue);
		clReleaseMemObject(image);
	}
	printf("image: %lu stale\n", stale);
	return 0;
}
