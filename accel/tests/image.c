// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A program that works on images: scales a picture by a sampler that interpolates, blurs it into an image array layer by layer, and prints a
 * checksum of each step. Uses what such programs use: samplers, 2D images and arrays, copies between images and buffers, mapping.
 */
#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 320, HEIGHT = 200, BIG_W = 500, BIG_H = 333, LAYERS = 4 };

#define NEED(call)                                                       \
	do {                                                             \
		int status = (call);                                     \
		if (status) {                                            \
			printf("%s: %d\n", #call, status);               \
			exit(1);                                         \
		}                                                        \
	} while (0)

static const char *source =
	"constant sampler_t smooth = CLK_NORMALIZED_COORDS_TRUE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_LINEAR;"
	"constant sampler_t exact = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_NEAREST;"
	"kernel void scale(read_only image2d_t from, write_only image2d_t to) {"
	"  int2 at = (int2)(get_global_id(0), get_global_id(1));"
	"  float2 where = (convert_float2(at) + 0.5f) / convert_float2(get_image_dim(to));"
	"  write_imagef(to, at, read_imagef(from, smooth, where)); }"
	"kernel void blur(read_only image2d_t from, write_only image2d_array_t to, int layer) {"
	"  int2 at = (int2)(get_global_id(0), get_global_id(1)); float4 sum = 0;"
	"  for (int y = -1; y <= 1; y++) for (int x = -1; x <= 1; x++)"
	"    sum += read_imagef(from, exact, at + (int2)(x, y) * (layer + 1));"
	"  write_imagef(to, (int4)(at, layer, 0), sum / 9.0f); }";

static unsigned sum(const unsigned char *p, size_t n)
{
	unsigned s = 1;
	for (size_t i = 0; i < n; i++)
		s = s * 31 + p[i];
	return s;
}

int main(void)
{
	cl_platform_id platform;
	cl_device_id device;
	int code;

	NEED(clGetPlatformIDs(1, &platform, NULL));
	NEED(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
	cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	NEED(code);
	cl_command_queue queue = clCreateCommandQueue(context, device, 0, &code);
	NEED(code);
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &code);
	NEED(code);
	NEED(clBuildProgram(program, 1, &device, "", NULL, NULL));

	unsigned char *picture = malloc(WIDTH * HEIGHT * 4);
	for (int i = 0; i < WIDTH * HEIGHT * 4; i++)
		picture[i] = (i * 7 + i / WIDTH * 3) ^ (i >> 5);
	cl_image_format format = {CL_RGBA, CL_UNORM_INT8};
	cl_image_desc flat = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = WIDTH, .image_height = HEIGHT};
	cl_image_desc big = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = BIG_W, .image_height = BIG_H};
	cl_image_desc array = {.image_type = CL_MEM_OBJECT_IMAGE2D_ARRAY, .image_width = BIG_W, .image_height = BIG_H,
			       .image_array_size = LAYERS};
	cl_mem from = clCreateImage(context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, &format, &flat, picture, &code);
	NEED(code);
	cl_mem scaled = clCreateImage(context, CL_MEM_READ_WRITE, &format, &big, NULL, &code);
	NEED(code);
	cl_mem layers = clCreateImage(context, CL_MEM_READ_WRITE, &format, &array, NULL, &code);
	NEED(code);

	size_t size[2] = {BIG_W, BIG_H};
	cl_kernel scale = clCreateKernel(program, "scale", &code);
	NEED(code);
	NEED(clSetKernelArg(scale, 0, sizeof from, &from));
	NEED(clSetKernelArg(scale, 1, sizeof scaled, &scaled));
	NEED(clEnqueueNDRangeKernel(queue, scale, 2, NULL, size, NULL, 0, NULL, NULL));
	cl_kernel blur = clCreateKernel(program, "blur", &code);
	NEED(code);
	NEED(clSetKernelArg(blur, 0, sizeof scaled, &scaled));
	NEED(clSetKernelArg(blur, 1, sizeof layers, &layers));
	for (int i = 0; i < LAYERS; i++) {
		NEED(clSetKernelArg(blur, 2, sizeof i, &i));
		NEED(clEnqueueNDRangeKernel(queue, blur, 2, NULL, size, NULL, 0, NULL, NULL));
	}

	unsigned char *out = malloc(BIG_W * BIG_H * 4);
	size_t origin[3] = {0}, region[3] = {BIG_W, BIG_H, 1};
	NEED(clEnqueueReadImage(queue, scaled, CL_TRUE, origin, region, 0, 0, out, 0, NULL, NULL));
	printf("scaled %08x\n", sum(out, BIG_W * BIG_H * 4));
	for (size_t i = 0; i < LAYERS; i++) {
		size_t row, slice, at[3] = {0, 0, i};
		unsigned char *map = clEnqueueMapImage(queue, layers, CL_TRUE, CL_MAP_READ, at, region, &row, &slice, 0, NULL, NULL, &code);
		NEED(code);
		unsigned s = 1;
		for (int y = 0; y < BIG_H; y++)
			s = s * 31 + sum(map + y * row, BIG_W * 4);
		printf("layer %zu %08x\n", i, s);
		NEED(clEnqueueUnmapMemObject(queue, layers, map, 0, NULL, NULL));
	}
	cl_mem buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, BIG_W * BIG_H * 4, NULL, &code);
	NEED(code);
	size_t third[3] = {0, 0, 2};
	NEED(clEnqueueCopyImageToBuffer(queue, layers, buffer, third, region, 0, 0, NULL, NULL));
	NEED(clEnqueueCopyBufferToImage(queue, buffer, scaled, 0, origin, region, 0, NULL, NULL));
	NEED(clEnqueueReadImage(queue, scaled, CL_TRUE, origin, region, 0, 0, out, 0, NULL, NULL));
	printf("third layer as a picture %08x\n", sum(out, BIG_W * BIG_H * 4));
	return 0;
}
