// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Makes calls of OpenCL, right and wrong ones, and prints what each answers: one line per claim. Run natively and forwarded, the two
 * outputs must be the same. Prints nothing that may differ between two native runs (times, addresses).
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static cl_platform_id platform;
static cl_device_id device;
static cl_context context;
static cl_command_queue queue, unordered;
static int code;

#define SAY(call) printf("%-4d %s\n", (int)(call), #call)
#define MAKE(result, call) ((result) = (call), printf("%-4d %s\n", code, #call))

static const char *source = "kernel void scale(global int *data, int by, local int *tmp) {"
			    "  tmp[get_local_id(0)] = data[get_global_id(0)] * by; barrier(CLK_LOCAL_MEM_FENCE);"
			    "  data[get_global_id(0)] = tmp[get_local_id(0)]; }"
			    "kernel void invert(read_only image2d_t from, write_only image2d_t to, sampler_t s) {"
			    "  int2 at = (int2)(get_global_id(0), get_global_id(1));"
			    "  write_imageui(to, at, 255 - read_imageui(from, s, at)); }";

static unsigned sum(const void *p, size_t n)
{
	const unsigned char *b = p;
	unsigned s = 1;
	for (size_t i = 0; i < n; i++)
		s = s * 31 + b[i];
	return s;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int called, called_status;

static void note(int status)
{
	pthread_mutex_lock(&lock);
	called++;
	called_status = status;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
}

static void wait_called(int n)
{
	pthread_mutex_lock(&lock);
	while (called < n)
		pthread_cond_wait(&changed, &lock);
	printf("     called %d times, status %d\n", called, called_status);
	called = 0;
	pthread_mutex_unlock(&lock);
}

static void CL_CALLBACK on_event(cl_event e, cl_int status, void *user)
{
	(void)e;
	*(int *)user = 1;
	note(status);
}

static void CL_CALLBACK on_build(cl_program p, void *user)
{
	(void)p;
	(void)user;
	note(0);
}

/* Says in which order the destructors were called; when is up to the driver. */
static void CL_CALLBACK on_gone(cl_mem m, void *user)
{
	static int order;

	(void)m;
	order = order * 10 + *(int *)user;
	note(order);
}

static void buffers(void)
{
	int data[256], back[256];
	cl_mem a, b, sub;
	for (int i = 0; i < 256; i++)
		data[i] = i * 7;
	MAKE(a, clCreateBuffer(context, CL_MEM_COPY_HOST_PTR, sizeof data, data, &code));
	MAKE(b, clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof data, NULL, &code));
	SAY(clEnqueueCopyBuffer(queue, a, b, 0, 0, sizeof data, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, b, CL_TRUE, 0, sizeof back, back, 0, NULL, NULL));
	printf("     copied %d\n", !memcmp(data, back, sizeof data));
	/* Arguments that are wrong. */
	cl_mem bad;
	MAKE(bad, clCreateBuffer(context, CL_MEM_READ_WRITE, 0, NULL, &code));
	MAKE(bad, clCreateBuffer(context, CL_MEM_READ_ONLY | CL_MEM_WRITE_ONLY, 16, NULL, &code));
	MAKE(bad, clCreateBuffer(context, CL_MEM_USE_HOST_PTR, 16, NULL, &code));
	MAKE(bad, clCreateBuffer(context, CL_MEM_READ_WRITE, 16, data, &code));
	MAKE(bad, clCreateBuffer(context, CL_MEM_USE_HOST_PTR | CL_MEM_ALLOC_HOST_PTR, 16, data, &code));
	MAKE(bad, clCreateBuffer(NULL, CL_MEM_READ_WRITE, 16, NULL, &code));
	MAKE(bad, clCreateBuffer(context, CL_MEM_READ_WRITE, (size_t)1 << 60, NULL, &code));
	(void)bad;
	SAY(clEnqueueReadBuffer(queue, b, CL_TRUE, 1000, 100, back, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, b, CL_TRUE, 0, 16, NULL, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(NULL, b, CL_TRUE, 0, 16, back, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, NULL, CL_TRUE, 0, 16, back, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, b, CL_TRUE, 0, 16, back, 1, NULL, NULL));
	SAY(clEnqueueCopyBuffer(queue, a, a, 0, 8, 64, 0, NULL, NULL));
	SAY(clEnqueueCopyBuffer(queue, a, b, 1020, 0, 64, 0, NULL, NULL));
	int pattern = 42;
	SAY(clEnqueueFillBuffer(queue, b, &pattern, 4, 0, 512, 0, NULL, NULL));
	SAY(clEnqueueFillBuffer(queue, b, &pattern, 3, 0, 512, 0, NULL, NULL));
	SAY(clEnqueueFillBuffer(queue, b, &pattern, 4, 2, 512, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, b, CL_TRUE, 0, sizeof back, back, 0, NULL, NULL));
	printf("     filled %u\n", sum(back, sizeof back));
	/* Rectangles. */
	size_t o[3] = {4, 2, 0}, h[3] = {0, 0, 0}, r[3] = {8, 4, 2};
	memset(back, 0, sizeof back);
	SAY(clEnqueueReadBufferRect(queue, a, CL_TRUE, o, h, r, 32, 256, 16, 64, back, 0, NULL, NULL));
	printf("     rectangle %u\n", sum(back, sizeof back));
	SAY(clEnqueueWriteBufferRect(queue, b, CL_TRUE, o, h, r, 32, 256, 16, 64, data, 0, NULL, NULL));
	SAY(clEnqueueCopyBufferRect(queue, b, a, o, h, r, 32, 256, 32, 256, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, a, CL_TRUE, 0, sizeof back, back, 0, NULL, NULL));
	printf("     rectangle %u\n", sum(back, sizeof back));
	size_t far[3] = {0, 0, 100};
	SAY(clEnqueueReadBufferRect(queue, a, CL_TRUE, far, h, r, 32, 256, 16, 64, back, 0, NULL, NULL));
	/* Parts. */
	cl_buffer_region region = {0, 512}, beyond = {1024, 512};
	MAKE(sub, clCreateSubBuffer(a, CL_MEM_READ_ONLY, CL_BUFFER_CREATE_TYPE_REGION, &region, &code));
	cl_mem none;
	MAKE(none, clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, &beyond, &code));
	MAKE(none, clCreateSubBuffer(a, 0, CL_BUFFER_CREATE_TYPE_REGION, NULL, &code));
	(void)none;
	SAY(clEnqueueReadBuffer(queue, sub, CL_TRUE, 0, 512, back, 0, NULL, NULL));
	printf("     part %u\n", sum(back, 512));
	cl_mem of;
	size_t at = 7;
	SAY(clGetMemObjectInfo(sub, CL_MEM_ASSOCIATED_MEMOBJECT, sizeof of, &of, NULL));
	printf("     part of it %d\n", of == a);
	SAY(clGetMemObjectInfo(sub, CL_MEM_OFFSET, sizeof at, &at, NULL));
	printf("     offset %zu\n", at);
	SAY(clGetMemObjectInfo(sub, CL_MEM_OFFSET, 1, &at, NULL));
	SAY(clGetMemObjectInfo(sub, 0x9999, sizeof at, &at, NULL));
	SAY(clSetMemObjectDestructorCallback(b, on_gone, &(int){1}));
	SAY(clSetMemObjectDestructorCallback(b, on_gone, &(int){2}));
	SAY(clSetMemObjectDestructorCallback(b, NULL, NULL));
	SAY(clFinish(queue));
	SAY(clReleaseMemObject(sub));
	SAY(clReleaseMemObject(b));
	wait_called(2);
	SAY(clReleaseMemObject(a));
}

static void maps(void)
{
	enum { N = 1 << 16 };
	static char host[N] __attribute__((aligned(4096)));
	cl_mem_flags kinds[] = {CL_MEM_READ_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_USE_HOST_PTR};
	for (int k = 0; k < 3; k++) {
		cl_mem m;
		cl_event e;
		cl_uint n = 9;
		memset(host, 5, N);
		MAKE(m, clCreateBuffer(context, kinds[k], N, k == 2 ? host : NULL, &code));
		char *p;
		MAKE(p, clEnqueueMapBuffer(queue, m, CL_TRUE, CL_MAP_WRITE_INVALIDATE_REGION, 0, N, 0, NULL, NULL, &code));
		if (p)
			memset(p, 17, N);
		SAY(clGetMemObjectInfo(m, CL_MEM_MAP_COUNT, sizeof n, &n, NULL));
		printf("     mapped %u\n", n);
		SAY(clEnqueueUnmapMemObject(queue, m, p, 0, NULL, NULL));
		MAKE(p, clEnqueueMapBuffer(queue, m, CL_FALSE, CL_MAP_READ, 64, 4096, 0, NULL, &e, &code));
		SAY(clWaitForEvents(1, &e));
		cl_command_type type = 0;
		SAY(clGetEventInfo(e, CL_EVENT_COMMAND_TYPE, sizeof type, &type, NULL));
		printf("     type %x, seen %u, at its host pointer %d\n", type, sum(p, 4096), p == host + 64);
		SAY(clReleaseEvent(e));
		SAY(clEnqueueUnmapMemObject(queue, m, p, 0, NULL, &e));
		SAY(clWaitForEvents(1, &e));
		SAY(clGetEventInfo(e, CL_EVENT_COMMAND_TYPE, sizeof type, &type, NULL));
		printf("     type %x\n", type);
		SAY(clReleaseEvent(e));
		SAY(clEnqueueUnmapMemObject(queue, m, host + 1, 0, NULL, NULL));
		MAKE(p, clEnqueueMapBuffer(queue, m, CL_TRUE, CL_MAP_READ, N, 1, 0, NULL, NULL, &code));
		SAY(clReleaseMemObject(m));
	}
}

static void images(void)
{
	enum { W = 61, H = 33 };
	unsigned char pixels[H][W][4], back[H][W][4];
	for (size_t i = 0; i < sizeof pixels; i++)
		((unsigned char *)pixels)[i] = i * 13;
	cl_image_format format = {CL_RGBA, CL_UNSIGNED_INT8};
	cl_image_desc desc = {.image_type = CL_MEM_OBJECT_IMAGE2D, .image_width = W, .image_height = H};
	cl_mem from, to, buffer;
	MAKE(from, clCreateImage(context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, &format, &desc, pixels, &code));
	MAKE(to, clCreateImage(context, CL_MEM_WRITE_ONLY, &format, &desc, NULL, &code));
	cl_mem bad;
	cl_image_format wrong = {CL_RGBA, 0x9999};
	MAKE(bad, clCreateImage(context, 0, &wrong, &desc, NULL, &code));
	MAKE(bad, clCreateImage(context, 0, NULL, &desc, NULL, &code));
	MAKE(bad, clCreateImage(context, 0, &format, NULL, NULL, &code));
	(void)bad;
	size_t origin[3] = {0}, region[3] = {W, H, 1}, part[3] = {7, 5, 1}, at[3] = {7, 5, 0}, outside[3] = {60, 30, 0};
	cl_program program;
	MAKE(program, clCreateProgramWithSource(context, 1, &source, NULL, &code));
	SAY(clBuildProgram(program, 0, NULL, NULL, NULL, NULL));
	cl_kernel kernel;
	cl_sampler sampler;
	MAKE(kernel, clCreateKernel(program, "invert", &code));
	MAKE(sampler, clCreateSampler(context, CL_FALSE, CL_ADDRESS_CLAMP, CL_FILTER_NEAREST, &code));
	SAY(clSetKernelArg(kernel, 0, sizeof from, &from));
	SAY(clSetKernelArg(kernel, 1, sizeof to, &to));
	SAY(clSetKernelArg(kernel, 2, sizeof sampler, &sampler));
	SAY(clEnqueueNDRangeKernel(queue, kernel, 2, NULL, region, NULL, 0, NULL, NULL));
	SAY(clEnqueueReadImage(queue, to, CL_TRUE, origin, region, 0, 0, back, 0, NULL, NULL));
	int good = 1;
	for (size_t i = 0; i < sizeof pixels; i++)
		good &= ((unsigned char *)back)[i] == 255 - ((unsigned char *)pixels)[i];
	printf("     inverted %d\n", good);
	SAY(clEnqueueWriteImage(queue, to, CL_TRUE, origin, part, W * 4, 0, pixels, 0, NULL, NULL));
	SAY(clEnqueueWriteImage(queue, to, CL_TRUE, outside, part, 0, 0, pixels, 0, NULL, NULL));
	unsigned color[4] = {1, 2, 3, 4};
	SAY(clEnqueueFillImage(queue, to, color, at, part, 0, NULL, NULL));
	SAY(clEnqueueCopyImage(queue, from, to, at, origin, part, 0, NULL, NULL));
	MAKE(buffer, clCreateBuffer(context, 0, sizeof pixels, NULL, &code));
	SAY(clEnqueueCopyImageToBuffer(queue, to, buffer, origin, region, 0, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, sizeof back, back, 0, NULL, NULL));
	printf("     pixels %u\n", sum(back, sizeof back));
	SAY(clEnqueueCopyBufferToImage(queue, buffer, to, 16, at, part, 0, NULL, NULL));
	size_t row = 0, slice = 9, width = 0;
	unsigned char *p;
	MAKE(p, clEnqueueMapImage(queue, to, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, at, part, &row, &slice, 0, NULL, NULL, &code));
	unsigned seen = 0;
	for (size_t y = 0; p && y < part[1]; y++) {
		seen = seen * 7 + sum(p + y * row, part[0] * 4);
		memset(p + y * row, 99, part[0] * 4);
	}
	printf("     mapped pixels %u, slices of %zu\n", seen, slice);
	if (p)
		SAY(clEnqueueUnmapMemObject(queue, to, p, 0, NULL, NULL));
	SAY(clEnqueueReadImage(queue, to, CL_TRUE, origin, region, 0, 0, back, 0, NULL, NULL));
	printf("     pixels %u\n", sum(back, sizeof back));
	SAY(clGetImageInfo(to, CL_IMAGE_WIDTH, sizeof width, &width, NULL));
	printf("     width %zu\n", width);
	cl_uint n = 0;
	SAY(clGetSupportedImageFormats(context, CL_MEM_READ_WRITE, CL_MEM_OBJECT_IMAGE2D, 0, NULL, &n));
	printf("     formats %u\n", n);
	clReleaseKernel(kernel);
	clReleaseSampler(sampler);
	clReleaseProgram(program);
	clReleaseMemObject(buffer);
	clReleaseMemObject(from);
	clReleaseMemObject(to);
}

static void programs(void)
{
	cl_program p, broken, header, linked;
	cl_kernel k, all[4];
	cl_uint n = 0;
	char text[4096];
	size_t size;
	MAKE(p, clCreateProgramWithSource(context, 0, NULL, NULL, &code));
	MAKE(p, clCreateProgramWithSource(context, 1, &source, NULL, &code));
	MAKE(k, clCreateKernel(p, "scale", &code));
	SAY(clBuildProgram(p, 1, &device, "-DUNUSED=1", on_build, NULL));
	wait_called(1);
	MAKE(k, clCreateKernel(p, "missing", &code));
	SAY(clCreateKernelsInProgram(p, 0, NULL, &n));
	printf("     kernels %u\n", n);
	SAY(clCreateKernelsInProgram(p, 4, all, &n));
	for (cl_uint i = 0; i < n; i++)
		clReleaseKernel(all[i]);
	SAY(clGetProgramInfo(p, CL_PROGRAM_KERNEL_NAMES, sizeof text, text, &size));
	printf("     %s\n", text);
	MAKE(k, clCreateKernel(p, "scale", &code));
	SAY(clGetKernelInfo(k, CL_KERNEL_FUNCTION_NAME, sizeof text, text, &size));
	printf("     %s %zu\n", text, size);
	int by = 3;
	SAY(clSetKernelArg(k, 7, 4, &by));
	SAY(clSetKernelArg(k, 1, 8, &by));
	SAY(clSetKernelArg(k, 1, 4, &by));
	size_t global = 64, odd = 7;
	SAY(clEnqueueNDRangeKernel(queue, k, 0, NULL, &global, NULL, 0, NULL, NULL));
	SAY(clEnqueueNDRangeKernel(queue, k, 4, NULL, &global, NULL, 0, NULL, NULL));
	SAY(clEnqueueNDRangeKernel(NULL, k, 1, NULL, &global, NULL, 0, NULL, NULL));
	int data[64];
	for (int i = 0; i < 64; i++)
		data[i] = i;
	cl_mem m;
	MAKE(m, clCreateBuffer(context, CL_MEM_COPY_HOST_PTR, sizeof data, data, &code));
	SAY(clSetKernelArg(k, 0, sizeof m, &m));
	SAY(clSetKernelArg(k, 2, 64 * 4, NULL));
	SAY(clEnqueueNDRangeKernel(queue, k, 1, NULL, &global, &odd, 0, NULL, NULL));
	for (int i = 0; i < 3; i++)
		SAY(clEnqueueNDRangeKernel(queue, k, 1, NULL, &global, &global, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, m, CL_TRUE, 0, sizeof data, data, 0, NULL, NULL));
	printf("     scaled %d %d\n", data[1], data[63]);
	/* Binaries there and back. */
	size_t length = 0;
	SAY(clGetProgramInfo(p, CL_PROGRAM_BINARY_SIZES, sizeof length, &length, NULL));
	unsigned char *binary = malloc(length);
	const unsigned char *again = binary;
	SAY(clGetProgramInfo(p, CL_PROGRAM_BINARIES, sizeof binary, &binary, NULL));
	cl_int state = 5;
	cl_program q;
	MAKE(q, clCreateProgramWithBinary(context, 1, &device, &length, &again, &state, &code));
	printf("     binary status %d\n", state);
	SAY(clBuildProgram(q, 0, NULL, NULL, NULL, NULL));
	cl_kernel kq;
	MAKE(kq, clCreateKernel(q, "scale", &code));
	clReleaseKernel(kq);
	clReleaseProgram(q);
	free(binary);
	/* Sources that don't build. */
	const char *nonsense = "kernel void f( {";
	MAKE(broken, clCreateProgramWithSource(context, 1, &nonsense, NULL, &code));
	SAY(clBuildProgram(broken, 0, NULL, NULL, NULL, NULL));
	cl_build_status status = 5;
	SAY(clGetProgramBuildInfo(broken, device, CL_PROGRAM_BUILD_STATUS, sizeof status, &status, NULL));
	printf("     build status %d\n", status);
	SAY(clGetProgramBuildInfo(broken, device, CL_PROGRAM_BUILD_LOG, 0, NULL, &size));
	printf("     there is a log: %d\n", size > 1);
	SAY(clBuildProgram(NULL, 0, NULL, NULL, NULL, NULL));
	/* Compile and link. */
	const char *text_h = "int twice(int x);", *text_c = "#include \"twice.h\"\nkernel void t(global int *x) { x[0] = twice(x[0]); }";
	const char *text_d = "int twice(int x) { return 2 * x; }", *name = "twice.h";
	cl_program parts[2];
	MAKE(header, clCreateProgramWithSource(context, 1, &text_h, NULL, &code));
	MAKE(parts[0], clCreateProgramWithSource(context, 1, &text_c, NULL, &code));
	MAKE(parts[1], clCreateProgramWithSource(context, 1, &text_d, NULL, &code));
	SAY(clCompileProgram(parts[0], 0, NULL, NULL, 1, &header, &name, NULL, NULL));
	SAY(clCompileProgram(parts[1], 0, NULL, NULL, 0, NULL, NULL, NULL, NULL));
	MAKE(linked, clLinkProgram(context, 0, NULL, NULL, 2, parts, NULL, NULL, &code));
	cl_kernel t;
	MAKE(t, clCreateKernel(linked, "t", &code));
	SAY(clSetKernelArg(t, 0, sizeof m, &m));
	SAY(clEnqueueTask(queue, t, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, m, CL_TRUE, 0, 4, data, 0, NULL, NULL));
	clReleaseKernel(t);
	clReleaseKernel(k);
	clReleaseProgram(linked);
	clReleaseProgram(parts[0]);
	clReleaseProgram(parts[1]);
	clReleaseProgram(header);
	clReleaseProgram(broken);
	clReleaseProgram(p);
	clReleaseMemObject(m);
}

static void *complete(void *event)
{
	usleep(20000);
	clSetUserEventStatus(event, CL_COMPLETE);
	return NULL;
}

static void put(const char *folder, const char *name, const char *text)
{
	char path[256];
	snprintf(path, sizeof path, "%s/%s", folder, name);
	FILE *f = fopen(path, "w");
	if (!f || fputs(text, f) < 0 || fclose(f))
		abort();
}

/* Files that kernels include lie where the program runs. */
static void includes(void)
{
	char folder[] = "/tmp/tombolo-calls-XXXXXX", second[64], options[256], text[256];
	const char *names[] = {"first.h", "deep/near.h", "deep/beside.h", "second/last.h", "second/first.h"};
	const char *including = "#include \"first.h\"\n # include <last.h>\n"
				"kernel void sum(global int *x) { x[0] = FIRST + NEAR + BESIDE + LAST + GIVEN; }";
	int data = 0;
	size_t size;
	cl_program p;
	cl_kernel k;
	cl_mem m;
	if (!mkdtemp(folder))
		abort();
	snprintf(second, sizeof second, "%s/second", folder);
	snprintf(text, sizeof text, "%s/deep", folder);
	if (mkdir(second, 0755) || mkdir(text, 0755))
		abort();
	put(folder, names[0], "#define FIRST 1\n#include \"deep/near.h\"\n");
	put(folder, names[1], "#define NEAR 20\n#include \"beside.h\"\n");
	put(folder, names[2], "#define BESIDE 300\n");
	put(folder, names[3], "#include <../deep/beside.h>\n#define LAST 4000\n");
	put(folder, names[4], "#error this one is never read\n");
	snprintf(options, sizeof options, "-I %s -DGIVEN=50000 -I%s", folder, second);
	MAKE(p, clCreateProgramWithSource(context, 1, &including, NULL, &code));
	SAY(clBuildProgram(p, 0, NULL, options, NULL, NULL));
	SAY(clGetProgramBuildInfo(p, device, CL_PROGRAM_BUILD_OPTIONS, 1, text, &size));
	SAY(clGetProgramBuildInfo(p, device, CL_PROGRAM_BUILD_OPTIONS, sizeof text, text, &size));
	printf("     its options: %d %d\n", size == strlen(options) + 1, !strcmp(options, text));
	MAKE(k, clCreateKernel(p, "sum", &code));
	MAKE(m, clCreateBuffer(context, CL_MEM_READ_WRITE, sizeof data, NULL, &code));
	SAY(clSetKernelArg(k, 0, sizeof m, &m));
	SAY(clEnqueueTask(queue, k, 0, NULL, NULL));
	SAY(clEnqueueReadBuffer(queue, m, CL_TRUE, 0, sizeof data, &data, 0, NULL, NULL));
	printf("     summed %d\n", data);
	clReleaseKernel(k);
	clReleaseProgram(p);
	clReleaseMemObject(m);
	MAKE(p, clCreateProgramWithSource(context, 1, &including, NULL, &code));
	SAY(clCompileProgram(p, 0, NULL, options, 0, NULL, NULL, NULL, NULL));
	clReleaseProgram(p);
	MAKE(p, clCreateProgramWithSource(context, 1, &including, NULL, &code));
	SAY(clBuildProgram(p, 0, NULL, "-DGIVEN=1", NULL, NULL));
	clReleaseProgram(p);
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(text, sizeof text, "%s/%s", folder, names[i]);
		unlink(text);
	}
	snprintf(text, sizeof text, "%s/deep", folder);
	rmdir(text);
	rmdir(second);
	rmdir(folder);
}

static void events(void)
{
	cl_event user, read, marker, other;
	cl_int status = 9;
	int data[64] = {0}, flag = 0;
	cl_mem m;
	MAKE(m, clCreateBuffer(context, 0, sizeof data, NULL, &code));
	MAKE(user, clCreateUserEvent(context, &code));
	SAY(clGetEventInfo(user, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL));
	printf("     status %d\n", status);
	int pattern = 5;
	SAY(clEnqueueFillBuffer(unordered, m, &pattern, 4, 0, sizeof data, 1, &user, &other));
	SAY(clEnqueueReadBuffer(unordered, m, CL_FALSE, 0, sizeof data, data, 1, &other, &read));
	SAY(clEnqueueMarkerWithWaitList(queue, 1, &read, &marker));
	SAY(clSetEventCallback(read, CL_COMPLETE, on_event, &flag));
	SAY(clFlush(unordered));
	SAY(clFlush(queue));
	printf("     not yet: %d %d\n", data[0], flag);
	/* A thread waits in the driver while another lets it go on. */
	pthread_t thread;
	pthread_create(&thread, NULL, complete, user);
	SAY(clWaitForEvents(1, &marker));
	pthread_join(thread, NULL);
	printf("     read before the marker: %d\n", data[63]);
	wait_called(1);
	SAY(clGetEventInfo(read, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, NULL));
	printf("     status %d\n", status);
	SAY(clSetUserEventStatus(user, CL_COMPLETE));
	SAY(clSetUserEventStatus(read, CL_COMPLETE));
	SAY(clWaitForEvents(0, NULL));
	SAY(clSetEventCallback(read, 17, on_event, &flag));
	SAY(clSetEventCallback(read, CL_COMPLETE, NULL, NULL));
	cl_command_queue of;
	SAY(clGetEventInfo(read, CL_EVENT_COMMAND_QUEUE, sizeof of, &of, NULL));
	printf("     its queue %d\n", of == unordered);
	cl_ulong t = 0;
	SAY(clGetEventProfilingInfo(user, CL_PROFILING_COMMAND_END, sizeof t, &t, NULL));
	SAY(clReleaseEvent(read));
	SAY(clReleaseEvent(other));
	SAY(clReleaseEvent(marker));
	SAY(clReleaseEvent(user));
	SAY(clEnqueueMarker(queue, NULL));
	SAY(clEnqueueBarrier(queue));
	SAY(clFinish(unordered));
	SAY(clReleaseMemObject(m));
}

static void large(void)
{
	/* Longer than a ring, longer than a piece, with a last piece so short that it travels in its record; in both directions. */
	size_t sizes[] = {1, 16384, 16385, (2 << 20) + 5, 5000003, 9000001, 40000000};
	for (int i = 0; i < 7; i++) {
		size_t n = sizes[i];
		unsigned char *a = malloc(n), *b = calloc(1, n);
		for (size_t j = 0; j < n; j++)
			a[j] = j * 31 + j / 1000;
		cl_mem m;
		MAKE(m, clCreateBuffer(context, 0, n, NULL, &code));
		SAY(clEnqueueWriteBuffer(queue, m, (i + 1) % 2, 0, n, a, 0, NULL, NULL));
		cl_event e;
		SAY(clEnqueueReadBuffer(queue, m, i % 2, 0, n, b, 0, NULL, &e));
		SAY(clWaitForEvents(1, &e));
		printf("     %zu bytes the same: %d\n", n, !memcmp(a, b, n));
		clReleaseEvent(e);
		clReleaseMemObject(m);
		free(a);
		free(b);
	}
}

/* Mapped, made from the program's data, and given back before the map was waited for: in a test, that is longer than the window. */
static void large_maps(void)
{
	enum { N = 9000000 };
	unsigned char *own;
	if (posix_memalign((void **)&own, 4096, N))
		return;
	cl_mem_flags kinds[] = {0, CL_MEM_ALLOC_HOST_PTR, CL_MEM_COPY_HOST_PTR, CL_MEM_COPY_HOST_PTR | CL_MEM_ALLOC_HOST_PTR, CL_MEM_USE_HOST_PTR};
	for (int k = 0; k < 5; k++) {
		cl_mem m;
		cl_event e;
		unsigned char *p, last = 0;
		for (size_t j = 0; j < N; j++)
			own[j] = j * 7 + j / 3000 + k;
		MAKE(m, clCreateBuffer(context, kinds[k], N, k >= 2 ? own : NULL, &code));
		if (k < 2) {
			MAKE(p, clEnqueueMapBuffer(queue, m, CL_TRUE, CL_MAP_WRITE, 0, N, 0, NULL, NULL, &code));
			if (p)
				memcpy(p, own, N);
			SAY(clEnqueueUnmapMemObject(queue, m, p, 0, NULL, NULL));
		}
		MAKE(p, clEnqueueMapBuffer(queue, m, CL_FALSE, CL_MAP_READ, 0, N, 0, NULL, NULL, &code));
		SAY(clEnqueueUnmapMemObject(queue, m, p, 0, NULL, NULL));
		MAKE(p, clEnqueueMapBuffer(queue, m, CL_FALSE, CL_MAP_READ | CL_MAP_WRITE, 5, N - 5, 0, NULL, &e, &code));
		SAY(clWaitForEvents(1, &e));
		printf("     the same: %d, at its host pointer %d\n", p && !memcmp(p, own + 5, N - 5), p == own + 5);
		if (p)
			p[N - 6] = 77;
		SAY(clReleaseEvent(e));
		SAY(clEnqueueUnmapMemObject(queue, m, p, 0, NULL, NULL));
		SAY(clEnqueueReadBuffer(queue, m, CL_TRUE, N - 1, 1, &last, 0, NULL, NULL));
		printf("     last byte %d\n", last);
		SAY(clReleaseMemObject(m));
		SAY(clFinish(queue));
	}
	free(own);
}

/* As C++ programs do it that keep objects in static variables. */
static cl_mem kept;
static cl_command_queue last;

__attribute__((destructor)) static void at_exit(void)
{
	if (!last)
		return;
	SAY(clFinish(last));
	SAY(clReleaseMemObject(kept));
	SAY(clReleaseCommandQueue(last));
}

int main(void)
{
	SAY(clGetPlatformIDs(1, &platform, NULL));
	SAY(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL));
	SAY(clGetDeviceIDs(platform, CL_DEVICE_TYPE_ACCELERATOR, 1, &device, NULL));
	SAY(clGetDeviceIDs(NULL, CL_DEVICE_TYPE_ALL, 1, &device, NULL) != 0);
	cl_context_properties properties[] = {CL_CONTEXT_PLATFORM, (cl_context_properties)platform, 0};
	MAKE(context, clCreateContext(properties, 0, NULL, NULL, NULL, &code));
	MAKE(context, clCreateContextFromType(properties, CL_DEVICE_TYPE_ALL, NULL, NULL, &code));
	clReleaseContext(context);
	MAKE(context, clCreateContext(properties, 1, &device, NULL, NULL, &code));
	MAKE(queue, clCreateCommandQueue(context, device, CL_QUEUE_PROFILING_ENABLE, &code));
	cl_queue_properties q[] = {CL_QUEUE_PROPERTIES, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, 0};
	MAKE(unordered, clCreateCommandQueueWithProperties(context, device, q, &code));
	buffers();
	maps();
	images();
	programs();
	includes();
	events();
	large();
	large_maps();
	cl_uint n = 0;
	SAY(clGetContextInfo(context, CL_CONTEXT_NUM_DEVICES, sizeof n, &n, NULL));
	printf("     devices %u\n", n);
	SAY(clReleaseCommandQueue(unordered));
	SAY(clReleaseCommandQueue(queue));
	MAKE(last, clCreateCommandQueue(context, device, 0, &code));
	MAKE(kept, clCreateBuffer(context, CL_MEM_READ_WRITE, 64, NULL, &code));
	SAY(clReleaseContext(context));
	return 0;
}
