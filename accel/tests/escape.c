// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A hostile client: its kernels make system calls themselves, which a device that is the CPU carries out in the server's worker (x86-64).
 *
 *	escape try SERVER NEIGHBOUR ABSTRACT SHMID FILE...
 *		tries to reach those processes, that socket, that memory of System V and those files; one line 'what: result' for each attempt,
 *		where a negative result is the kernel's error
 *	escape fill	takes as much memory, disk and processes as it gets; one line 'what: how much' for each
 *	escape pass FILE	passes a descriptor of the file, opened to read, to its worker, which changes the file's mode;
 *		one line 'what: result' for each step
 *	escape again	maps parts of what its worker shares a second time, from copies of these on, to what lies behind them in their files; one line
 *		'what: result' for each step
 *	escape crash	asks for a dump of its worker, and has it die; says 'survived' if that goes on
 *	escape old	makes a system call in the way of 32-bit programs; says 'survived' if that goes on
 *	escape many	starts processes, for ever
 *	escape orphan	tries to leave a stopped process in a group of its server that no parent in another group looks after, which the kernel ends;
 *		says 'another group: RESULT'
 *	escape replace	tries to have its worker execute another program in its place; says 'another program: RESULT'
 *	escape come	compiles, and goes
 *	escape linger	starts a process that always wants to run; says 'lingers', and ends with its standard input
 *	escape deaf	makes its worker blind for the end of its client; says 'deaf', and ends
 *	escape chatter	the same, and its worker never stops talking in the server's log
 */
#define CL_TARGET_OPENCL_VERSION 300
#define _GNU_SOURCE
#include <CL/cl.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char *source =
	"long sc(long n, long a, long b, long c, long d, long e, long f)\n"
	"{\n"
	"	long r;\n"
	"	__asm__ volatile(\"mov %5, %%r10; mov %6, %%r8; mov %7, %%r9; syscall\"\n"
	"		: \"=a\"(r) : \"a\"(n), \"D\"(a), \"S\"(b), \"d\"(c), \"rm\"(d), \"rm\"(e), \"rm\"(f)\n"
	"		: \"rcx\", \"r8\", \"r9\", \"r10\", \"r11\", \"memory\");\n"
	"	return r;\n"
	"}\n"
	/* A process that shares this one's memory and never touches its stack: waits, or runs for ever. */
	"long child(int runs)\n"
	"{\n"
	"	long r, flags = 0x100 | 17;\n"
	"	if (runs)\n"
	"		__asm__ volatile(\"xor %%edx, %%edx; xor %%r10d, %%r10d; xor %%r8d, %%r8d; syscall; test %%rax, %%rax; jnz 1f; 2: jmp 2b; 1:\"\n"
	"			: \"=a\"(r) : \"a\"(56L), \"D\"(flags), \"S\"(0L) : \"rcx\", \"rdx\", \"r8\", \"r10\", \"r11\", \"memory\");\n"
	"	else\n"
	"		__asm__ volatile(\"xor %%edx, %%edx; xor %%r10d, %%r10d; xor %%r8d, %%r8d; syscall; test %%rax, %%rax; jnz 1f; \"\n"
	"			\"2: mov $34, %%eax; syscall; jmp 2b; 1:\"\n"
	"			: \"=a\"(r) : \"a\"(56L), \"D\"(flags), \"S\"(0L) : \"rcx\", \"rdx\", \"r8\", \"r10\", \"r11\", \"memory\");\n"
	"	return r;\n"
	"}\n"
	/* Each call has a number, six arguments, and two bits for each of these: 1: an offset into data, 2: an earlier result. */
	"kernel void attempt(global long *calls, global char *data, global long *results, int n)\n"
	"{\n"
	"	for (int i = 0; i < n; i++) {\n"
	"		long a[6];\n"
	"		for (int j = 0; j < 6; j++) {\n"
	"			long v = calls[i * 8 + 1 + j], kind = calls[i * 8 + 7] >> (2 * j) & 3;\n"
	"			a[j] = kind == 1 ? (long)(data + v) : kind == 2 ? results[v] : v;\n"
	"		}\n"
	"		results[i] = sc(calls[i * 8], a[0], a[1], a[2], a[3], a[4], a[5]);\n"
	"	}\n"
	"}\n"
	/*
	 * Memory in MiB that was private and may then only be read; private memory, as far as it is promised; shared memory; bytes of a file; files; KiB in
	 * sockets; processes; signals under way.
	 */
	"kernel void fill(global char *path, global long *results)\n"
	"{\n"
	"	long n = 0, fd, at[1024];\n"
	"	while (n < 1024 && (at[n] = sc(9, 0, 64 << 20, 3, 0x22, -1, 0)) > 0 && sc(10, at[n], 64 << 20, 1, 0, 0, 0) == 0)\n"
	"		n++;\n"
	"	results[6] = n * 64;\n"
	"	while (n > 0)\n"
	"		sc(11, at[--n], 64 << 20, 0, 0, 0, 0);\n"
	"	while (n < 65536 && sc(9, 0, 1 << 20, 3, 0x22, -1, 0) > 0)\n"
	"		n++;\n"
	"	results[0] = n;\n"
	"	results[1] = sc(9, 0, 1 << 20, 3, 0x21, -1, 0);\n"
	"	fd = sc(257, -100, (long)path, 0102, 0600, 0, 0);\n"
	"	n = 0;\n"
	"	while (n < 4096 && sc(285, fd, 0, n << 20, 1 << 20, 0, 0) == 0)\n"
	"		n++;\n"
	"	sc(77, fd, 0, 0, 0, 0, 0);\n"
	"	results[2] = n;\n"
	"	char name[] = \"/tmp/aaaa\";\n"
	"	for (n = 0; n < 1 << 18; n++) {\n"
	"		for (int i = 0; i < 4; i++)\n"
	"			name[5 + i] = '0' + (n >> 6 * i & 63);\n"
	"		fd = sc(257, -100, (long)name, 0101, 0600, 0, 0);\n"
	"		if (fd < 0)\n"
	"			break;\n"
	"		sc(3, fd, 0, 0, 0, 0, 0);\n"
	"	}\n"
	"	results[3] = n;\n"
	"	int pair[2];\n"
	"	for (n = 0; sc(53, 1, 1, 0, (long)pair, 0, 0) == 0;)\n"
	"		for (int i = 0; i < 2; i++)\n"
	"			for (long sent; (sent = sc(44, pair[i], (long)name, sizeof(name), 0x40, 0, 0)) > 0;)\n"
	"				n += sent;\n"
	"	results[4] = n >> 10;\n"
	"	long blocked = 1L << 39;\n"
	"	sc(14, 0, (long)&blocked, 0, 8, 0, 0);\n"
	"	for (n = 0; n < 1 << 20 && sc(234, 1, sc(186, 0, 0, 0, 0, 0, 0), 40, 0, 0, 0) == 0;)\n"
	"		n++;\n"
	"	results[7] = n;\n"
	"	n = 0;\n"
	"	while (n < 65536 && child(0) > 0)\n"
	"		n++;\n"
	"	results[5] = n;\n"
	"}\n"
	/* Processes, and then more as soon as some have ended. */
	"kernel void many(global long *results) { for (;;) results[0] = child(0); }\n"
	"kernel void linger(global long *results) { results[0] = child(1); }\n"
	/* Three processes as above: the last one's end stops the second, and then the first ends, which has tried to be in a group of its own. */
	"kernel void orphan(global long *results)\n"
	"{\n"
	"	long first;\n"
	"	__asm__ volatile(\"mov $56, %%eax; mov $0x111, %%edi; xor %%esi, %%esi; xor %%edx, %%edx; xor %%r10d, %%r10d; xor %%r8d, %%r8d; syscall; \"\n"
	"		\"test %%rax, %%rax; jnz 9f; \"\n"
	"		\"mov $56, %%eax; syscall; test %%rax, %%rax; jnz 2f; \"\n"
	"		\"mov $56, %%eax; mov $0x113, %%edi; syscall; test %%rax, %%rax; jz 4f; 3: mov $34, %%eax; syscall; jmp 3b; \"\n"
	"		\"2: mov %%rax, %%r12; mov $109, %%eax; xor %%edi, %%edi; xor %%esi, %%esi; syscall; mov %%rax, (%%rbx); \"\n"
	"		\"mov $61, %%eax; mov %%r12, %%rdi; mov $0x40000002, %%edx; syscall; 4: mov $60, %%eax; xor %%edi, %%edi; syscall; 9:\"\n"
	"		: \"=a\"(first) : \"b\"(results) : \"rcx\", \"rdx\", \"rsi\", \"rdi\", \"r8\", \"r10\", \"r11\", \"r12\", \"memory\");\n"
	"	sc(61, first, 0, 0x40000000, 0, 0, 0);\n"
	"}\n"
	/* A program that runs for ever, in the place of this process. */
	"kernel void replace(global long *results)\n"
	"{\n"
	"	char path[] = \"/bin/sh\", option[] = \"-c\", words[] = \"while :; do :; done\";\n"
	"	long arguments[4] = { (long)path, (long)option, (long)words, 0 }, none = 0;\n"
	"	results[0] = sc(59, (long)path, (long)arguments, (long)&none, 0, 0, 0);\n"
	"	results[1] = sc(322, -100, (long)path, (long)arguments, (long)&none, 0, 0);\n"
	"}\n"
	/* A message with a descriptor from the client's socket; then the file's mode. */
	"kernel void take(global long *results)\n"
	"{\n"
	"	long vector[2], message[7] = { 0 }, control[4] = { 0 };\n"
	"	char byte;\n"
	"	vector[0] = (long)&byte;\n"
	"	vector[1] = 1;\n"
	"	message[2] = (long)vector;\n"
	"	message[3] = 1;\n"
	"	message[4] = (long)control;\n"
	"	message[5] = sizeof(control);\n"
	"	results[0] = sc(47, 4, (long)message, 0x40, 0, 0, 0);\n"
	"	results[1] = results[0] < 0 ? -1 : sc(91, control[2] & 0x7fffffff, 0666, 0, 0, 0, 0);\n"
	"}\n"
	/* The list of its worker's mappings, as far as there is room. */
	"kernel void mappings(global char *text, int size)\n"
	"{\n"
	"	char path[] = \"/proc/self/maps\";\n"
	"	long fd = sc(257, -100, (long)path, 0, 0, 0, 0), n = 0;\n"
	"	for (long got; n < size - 1 && (got = sc(0, fd, (long)(text + n), size - 1 - n, 0, 0, 0)) > 0;)\n"
	"		n += got;\n"
	"	text[n] = 0;\n"
	"	sc(3, fd, 0, 0, 0, 0, 0);\n"
	"}\n"
	/* May be dumped, without a limit that the kernel minds; then a write where nothing is mapped. */
	"kernel void crash(global long *results)\n"
	"{\n"
	"	long none[2] = { 0, 0 };\n"
	"	sc(157, 4, 1, 0, 0, 0, 0);\n"
	"	sc(160, 4, (long)none, 0, 0, 0, 0);\n"
	"	*(volatile global int *)results[0] = 1;\n"
	"}\n"
	/* getpid of 32 bits. */
	"kernel void old(global long *results)\n"
	"{\n"
	"	long r;\n"
	"	__asm__ volatile(\"int $0x80\" : \"=a\"(r) : \"a\"(20L) : \"r8\", \"r9\", \"r10\", \"r11\", \"memory\");\n"
	"	results[0] = r;\n"
	"}\n"
	/* From now on the file that its worker watches is another one. */
	"kernel void deafen(global long *results)\n"
	"{\n"
	"	for (int fd = 3; fd < 64; fd++)\n"
	"		sc(33, 0, fd, 0, 0, 0, 0);\n"
	"	results[0] = 0;\n"
	"}\n"
	"kernel void chatter(global long *results)\n"
	"{\n"
	/* Escape, and the character (U+009B) that stands for escape and a bracket. */
	"	char word[4] = { 27, 'c', 0xc2, 0x9b };\n"
	"	for (int fd = 3; fd < 64; fd++)\n"
	"		sc(33, 0, fd, 0, 0, 0, 0);\n"
	"	for (;;)\n"
	"		results[0] = sc(1, 2, (long)word, 4, 0, 0, 0);\n"
	"}\n";

static cl_context context;
static cl_command_queue queue;
static cl_program program;

static void die(const char *what, cl_int code)
{
	printf("%s: %d\n", what, code);
	exit(1);
}

static void begin(void)
{
	cl_platform_id platform;
	cl_device_id device;
	cl_int e;
	cl_uint n;

	if ((e = clGetPlatformIDs(1, &platform, &n)) || (e = clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, &n)))
		die("no device", e);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	queue = clCreateCommandQueueWithProperties(context, device, NULL, &e);
	program = clCreateProgramWithSource(context, 1, &source, NULL, &e);
	if ((e = clBuildProgram(program, 0, NULL, "", NULL, NULL))) {
		char log[8192];

		clGetProgramBuildInfo(program, device, CL_PROGRAM_BUILD_LOG, sizeof(log), log, NULL);
		fputs(log, stderr);
		die("build", e);
	}
}

/* Runs a kernel whose arguments are buffers with these contents, and an int where there is a fourth; gets the last buffer back. */
static cl_int run(const char *name, int n, void **contents, const size_t *sizes, int count)
{
	cl_int e;
	cl_kernel kernel = clCreateKernel(program, name, &e);
	cl_mem buffer = NULL;
	size_t one = 1;

	for (int i = 0; i < n; i++) {
		buffer = clCreateBuffer(context, CL_MEM_COPY_HOST_PTR, sizes[i], contents[i], &e);
		clSetKernelArg(kernel, i, sizeof(buffer), &buffer);
	}
	if (count)
		clSetKernelArg(kernel, n, sizeof(count), &count);
	e = clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, &one, 0, NULL, NULL);
	return e ? e : clEnqueueReadBuffer(queue, buffer, CL_TRUE, 0, sizes[n - 1], contents[n - 1], 0, NULL, NULL);
}

#define MOST 512
static struct {
	long number, arguments[6], kinds;
} calls[MOST];
static char names[MOST][128];
static char data[1 << 17];
static int n_calls, n_data;

/* Arguments of a call are pairs: a kind, and a value. */
enum { END = -1, PLAIN, DATA, RESULT };

static long put(const void *bytes, size_t len)
{
	long at = n_data;

	memcpy(data + at, bytes, len);
	n_data = (at + len + 15) & ~15;
	return at;
}

static int attempt(const char *name, long number, ...)
{
	va_list list;
	int kind;

	va_start(list, number);
	calls[n_calls].number = number;
	for (int i = 0; (kind = va_arg(list, int)) != END; i++) {
		calls[n_calls].arguments[i] = va_arg(list, long);
		calls[n_calls].kinds |= (long)kind << (2 * i);
	}
	va_end(list);
	snprintf(names[n_calls], sizeof(names[0]), "%s", name);
	return n_calls++;
}

#define P(value) PLAIN, (long)(value)
#define S(text) DATA, put(text, strlen(text) + 1)
#define OUT DATA, put((char[512]){ 0 }, 512)
#define TRY(name, ...) attempt(name, __VA_ARGS__, END)
/* A call that others need the result of, and whose own is not said. */
#define ALLOWED "+"

static void open_file(const char *path, int flags)
{
	char name[128];

	snprintf(name, sizeof(name), "open %s %s", path, flags == O_RDONLY ? "to read" : "to write");
	TRY(name, SYS_openat, P(AT_FDCWD), S(path), P(flags), P(0600));
}

static void processes(const char *who, long pid)
{
	unsigned long all = ~0ul;
	long limit[2] = { 3, 3 }, vector[4] = { 0x400000, 16, 0x400000, 16 };
	char name[128];
#define OTHER(what, ...) (snprintf(name, sizeof(name), "%s %s", what, who), TRY(name, __VA_ARGS__))
	OTHER("kill", SYS_kill, P(pid), P(SIGKILL));
	OTHER("tkill", SYS_tkill, P(pid), P(SIGKILL));
	OTHER("tgkill", SYS_tgkill, P(pid), P(pid), P(SIGKILL));
	OTHER("rt_sigqueueinfo", SYS_rt_sigqueueinfo, P(pid), P(SIGKILL), OUT);
	OTHER("rt_tgsigqueueinfo", SYS_rt_tgsigqueueinfo, P(pid), P(pid), P(SIGKILL), OUT);
	OTHER("pidfd_open", SYS_pidfd_open, P(pid), P(0));
	OTHER("ptrace attach", SYS_ptrace, P(16), P(pid), P(0), P(0));
	OTHER("ptrace seize", SYS_ptrace, P(0x4206), P(pid), P(0), P(0));
	OTHER("process_vm_readv", SYS_process_vm_readv, P(pid), DATA, put(vector, 16), P(1), DATA, put(vector, 16), P(1), P(0));
	OTHER("process_vm_writev", SYS_process_vm_writev, P(pid), DATA, put(vector, 16), P(1), DATA, put(vector, 16), P(1), P(0));
	OTHER("kcmp", SYS_kcmp, P(pid), P(pid), P(1), P(0), P(0));
	OTHER("prlimit64 read", SYS_prlimit64, P(pid), P(7), P(0), OUT);
	OTHER("prlimit64", SYS_prlimit64, P(pid), P(7), DATA, put(limit, 16), P(0));
	OTHER("sched_getaffinity", SYS_sched_getaffinity, P(pid), P(8), OUT);
	OTHER("sched_setaffinity", SYS_sched_setaffinity, P(pid), P(8), DATA, put(&all, 8));
	OTHER("sched_setscheduler", SYS_sched_setscheduler, P(pid), P(5), OUT);
	OTHER("setpriority", SYS_setpriority, P(0), P(pid), P(19));
	OTHER("ioprio_set", SYS_ioprio_set, P(1), P(pid), P(3 << 13));
	OTHER("migrate_pages", SYS_migrate_pages, P(pid), P(64), OUT, OUT);
	OTHER("move_pages", SYS_move_pages, P(pid), P(0), OUT, OUT, OUT, P(0));
	OTHER("getpgid", SYS_getpgid, P(pid));
	OTHER("getsid", SYS_getsid, P(pid));
	const char *files[] = { "mem", "environ", "maps", "root/etc/passwd", "fd/0", "ns/user", "stat" };

	for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
		char path[128];

		snprintf(path, sizeof(path), "/proc/%ld/%s", pid, files[i]);
		open_file(path, O_RDONLY);
	}
}

static void sockets(const char *abstract)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	socklen_t len = offsetof(struct sockaddr_un, sun_path) + 1 + strlen(abstract);
	int families[] = { AF_UNIX, AF_INET, AF_INET6, AF_PACKET, AF_ALG, AF_VSOCK, AF_BLUETOOTH, AF_XDP };
	long at;

	strcpy(to.sun_path + 1, abstract);
	for (size_t i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
		char name[64];
		int s;

		snprintf(name, sizeof(name), "a socket of family %d", families[i]);
		s = TRY(name, SYS_socket, P(families[i]), P(SOCK_DGRAM), P(0));
		snprintf(name, sizeof(name), "connect a socket of family %d", families[i]);
		TRY(name, SYS_connect, RESULT, (long)s, DATA, put(&to, len), P(len));
	}
	TRY("a pair of sockets", SYS_socketpair, P(AF_UNIX), P(SOCK_DGRAM), P(0), OUT);
	/* But what goes to the client itself: the fourth is its socket. */
	for (long fd = 3; fd < 24; fd += fd == 3 ? 2 : 1) {
		char name[64];

		snprintf(name, sizeof(name), "connect descriptor %ld to an abstract socket", fd);
		TRY(name, SYS_connect, P(fd), DATA, put(&to, len), P(len));
		at = put("x", 1);
		snprintf(name, sizeof(name), "send from descriptor %ld to an abstract socket", fd);
		TRY(name, SYS_sendto, P(fd), DATA, at, P(1), P(MSG_DONTWAIT), DATA, put(&to, len), P(len));
	}
}

/* Memory that no limit counts, what there is but once for the whole host. */
static void kernel_resources(void)
{
	struct {
		long value;
		int signal, notify;
		char rest[48];
	} event = { 0, SIGCONT, SIGEV_SIGNAL, { 0 } };
	long stack[2] = { 1l << 40, -1 };

	TRY("a timer", SYS_timer_create, P(CLOCK_MONOTONIC), DATA, put(&event, sizeof(event)), OUT);
	TRY("memory that grows down", SYS_mmap, P(0), P(4096), P(3), P(MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN), P(-1), P(0));
	TRY("the host's huge pages", SYS_mmap, P(0), P(2 << 20), P(3), P(MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB), P(-1), P(0));
	TRY("a stack without an end", SYS_prlimit64, P(0), P(RLIMIT_STACK), DATA, put(stack, sizeof(stack)), P(0));
	TRY("the host's places for asynchronous transfers", SYS_io_setup, P(1), OUT);
	TRY("the writes of all processes, out to the disk", SYS_sync);
	TRY("the same of one file system", SYS_syncfs, P(0));
	TRY("the user's watchers of files", SYS_inotify_init1, P(0));
	TRY("the same, older", SYS_inotify_init);
	TRY("the user's watchers of mounts", SYS_fanotify_init, P(0x200 /* FAN_REPORT_FID */), P(0));
	TRY("the user's descriptors under way", SYS_sendmsg, P(4), OUT, P(MSG_DONTWAIT));
	TRY("the same, many at once", SYS_sendmmsg, P(4), OUT, P(1), P(MSG_DONTWAIT));
	TRY("secret memory", SYS_memfd_secret, P(0));
	TRY("the kernel's memory, in buckets of futexes", SYS_prctl, P(78 /* PR_FUTEX_HASH */), P(1), P(1 << 20), P(0), P(0));
	TRY("memory that the host's other processes share", SYS_prctl, P(67 /* PR_SET_MEMORY_MERGE */), P(1), P(0), P(0), P(0));
	TRY("a processor core of its own", SYS_prctl, P(62 /* PR_SCHED_CORE */), P(1), P(0), P(0), P(0));
	TRY("a write of the supervisor that blocks", SYS_fcntl, P(2), P(F_SETFL), P(0));
	TRY("the same by ioctl", SYS_ioctl, P(2), P(FIONBIO), OUT);
	TRY("the kernel's routes", SYS_socket, P(AF_NETLINK), P(SOCK_RAW), P(0));
	TRY("descriptors to watch with", SYS_epoll_create1, P(0));
	TRY("the same, older", SYS_epoll_create, P(1));
	TRY("a filter of system calls", SYS_seccomp, P(2 /* SECCOMP_GET_ACTION_AVAIL */), P(0), DATA, put((int[]){ 0x7fff0000 }, 4));
	TRY("a mode of system calls", SYS_prctl, P(PR_SET_SECCOMP), P(2), OUT);
	TRY("rules of Landlock", SYS_landlock_create_ruleset, P(0), P(0), P(1));
	TRY("a stack for the processor", 453 /* map_shadow_stack */, P(0), P(1 << 20), P(0));
	TRY("memory in a pipe, without a copy", SYS_vmsplice, P(2), OUT, P(0), P(0));
	TRY("the kernel's memory, in tables of pages", SYS_mmap, P(0), P(1L << 40), P(PROT_READ), P(MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE), P(-1), P(0));
	TRY("pages for pipes", SYS_fcntl, P(2), P(F_SETPIPE_SZ), P(1 << 19));
}

/* Locks on a file that the host's programs may lock too, and what the host keeps of it in memory. */
static void files_of_others(void)
{
	struct flock shared = { .l_type = F_RDLCK };
	int file = TRY(ALLOWED "a file that is seen", SYS_openat, P(AT_FDCWD), S("/usr/bin/env"), P(O_RDONLY), P(0));
	int commands[] = { F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW };
	const char *nodes[] = { "/dev/null", "/dev/urandom" };
	long attribute[2] = { 0 };

	TRY("its lock", SYS_flock, RESULT, (long)file, P(LOCK_EX | LOCK_NB));
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		char name[64];

		snprintf(name, sizeof(name), "a lock on a part of it (%d)", commands[i]);
		TRY(name, SYS_fcntl, RESULT, (long)file, P(commands[i]), DATA, put(&shared, sizeof(shared)));
	}
	TRY("to be told when it is opened", SYS_fcntl, RESULT, (long)file, P(F_SETLEASE), P(F_RDLCK));
	TRY("out of the host's memory with it", SYS_fadvise64, RESULT, (long)file, P(0), P(0), P(4));
	TRY("its mode", SYS_fchmod, RESULT, (long)file, P(0777));
	TRY("its times", SYS_utimensat, RESULT, (long)file, P(0), P(0), P(0));
	/* A server of root may be the owner of the nodes. */
	for (size_t i = 0; i < sizeof(nodes) / sizeof(nodes[0]); i++) {
		char name[64];

		snprintf(name, sizeof(name), "the mode of %s", nodes[i]);
		TRY(name, SYS_fchmodat, P(AT_FDCWD), S(nodes[i]), P(0666));
		snprintf(name, sizeof(name), "the owner of %s", nodes[i]);
		TRY(name, SYS_fchownat, P(AT_FDCWD), S(nodes[i]), P(0), P(0), P(0));
		snprintf(name, sizeof(name), "the times of %s", nodes[i]);
		TRY(name, SYS_utimensat, P(AT_FDCWD), S(nodes[i]), P(0), P(0));
	}
	/* The standard input is a node too. */
	TRY("the mode of descriptor 0", SYS_fchmod, P(0), P(0666));
	TRY("the owner of descriptor 0", SYS_fchown, P(0), P(0), P(0));
	TRY("the times of descriptor 0", SYS_utimensat, P(0), P(0), P(0), P(0));
	/* Attributes of memory files are the kernel's memory, and no limit counts them. */
	for (long fd = 3; fd < 24; fd++) {
		char name[64];

		snprintf(name, sizeof(name), "an attribute of descriptor %ld", fd);
		TRY(name, SYS_fsetxattr, P(fd), S("user.escape"), S("x"), P(1), P(0));
	}
	TRY("an attribute of a file", SYS_setxattr, S("/tmp"), S("user.escape"), S("x"), P(1), P(0));
	TRY("the same, of a link", SYS_lsetxattr, S("/tmp"), S("user.escape"), S("x"), P(1), P(0));
	TRY("the same, by a newer call", 463 /* setxattrat */, P(AT_FDCWD), S("/tmp"), P(0), S("user.escape"), DATA, put(attribute, sizeof(attribute)), P(16));
}

/* The host's network by the client's socket, and what a socket can be told. */
static void sockets_of_the_client(void)
{
	struct ifreq loopback = { .ifr_name = "lo" };
	int on = 1;

	TRY("the host's interfaces", SYS_ioctl, P(4), P(SIOCGIFCONF), OUT);
	TRY("the address of one", SYS_ioctl, P(4), P(SIOCGIFHWADDR), DATA, put(&loopback, sizeof(loopback)));
	TRY("a longer queue of the client's socket", SYS_setsockopt, P(4), P(SOL_SOCKET), P(SO_RCVBUF), DATA, put(&on, 4), P(4));
	TRY("a filter on it", SYS_setsockopt, P(4), P(SOL_SOCKET), P(SO_ATTACH_FILTER), OUT, P(16));
	TRY("another peer", SYS_sendto, P(4), OUT, P(1), P(MSG_FASTOPEN | MSG_DONTWAIT), OUT, P(16));
	TRY("other clients", SYS_listen, P(4), P(8));
	TRY("one of them", SYS_accept4, P(4), P(0), P(0), P(SOCK_NONBLOCK));
}

/* A dump of this process, which a program of the host's root may read. */
static void core_dumps(void)
{
	long none[2] = { 0, 0 };

	TRY("a process that can be dumped", SYS_prctl, P(PR_SET_DUMPABLE), P(1), P(0), P(0), P(0));
	TRY("another limit of dumps", SYS_setrlimit, P(RLIMIT_CORE), DATA, put(none, sizeof(none)));
	TRY("the same by another call", SYS_prlimit64, P(0), P(RLIMIT_CORE), DATA, put(none, sizeof(none)), P(0));
}

/* System calls that kernels gained after the filter was written. */
static void newer_calls(void)
{
	TRY("a descriptor of another process", SYS_pidfd_getfd, P(0), P(0), P(0));
	TRY("memory of another process, out", SYS_process_madvise, P(0), OUT, P(1), P(21), P(0));
	TRY("memory of a dying process", 448 /* process_mrelease */, P(0), P(0));
	TRY("secrets of the kernel's clock", SYS_clock_settime, P(0), OUT);
	TRY("a handle of a file", SYS_open_by_handle_at, P(AT_FDCWD), OUT, P(O_RDONLY));
	TRY("another program's break", SYS_prctl, P(PR_SET_MM), P(PR_SET_MM_BRK), P(4096), P(0), P(0));
	TRY("a mount's place", SYS_move_mount, P(AT_FDCWD), S("/tmp"), P(AT_FDCWD), S("/usr"), P(0));
	TRY("a mount to pick", SYS_fspick, P(AT_FDCWD), S("/"), P(0));
	TRY("quotas", 443 /* quotactl_fd */, P(0), P(0), P(0), P(0));
	TRY("a group of the host's", SYS_openat, P(AT_FDCWD), S("/sys/fs/cgroup/cgroup.procs"), P(O_RDWR), P(0));
	TRY("its own memory through /proc", SYS_openat, P(AT_FDCWD), S("/proc/self/mem"), P(O_RDWR), P(0));
	TRY("what it maps, through /proc", SYS_openat, P(AT_FDCWD), S("/proc/self/map_files"), P(O_RDWR), P(0));
	TRY("its server's program", SYS_openat, P(AT_FDCWD), S("/proc/self/exe"), P(O_RDWR), P(0));
	TRY("more of the processor's time", SYS_sched_setattr, P(0), OUT, P(0));
	TRY("a group of the scheduler's, by a session", SYS_setsid);
	TRY("a group of processes", SYS_setpgid, P(0), P(0));
	TRY("a program's events elsewhere", SYS_fanotify_mark, P(0), P(1), P(1), P(AT_FDCWD), S("/usr"));
}

static void kernel_parts(long shmid)
{
	struct {
		unsigned version;
		int pid;
	} header = { 0x20080522, 0 };
	unsigned capabilities[6] = { ~0u, ~0u, ~0u, ~0u, ~0u, ~0u };
	unsigned long clone3[8] = { CLONE_NEWUSER, 0, 0, 0, SIGCHLD };
	int clones[] = { CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWCGROUP };

	TRY("System V memory of another", SYS_shmat, P(shmid), P(0), P(0));
	TRY("System V memory of its own", SYS_shmget, P(0), P(4096), P(01600));
	TRY("System V messages", SYS_msgget, P(0), P(01600));
	TRY("System V semaphores", SYS_semget, P(0), P(1), P(01600));
	TRY("a message queue", SYS_mq_open, S("escape"), P(O_RDWR | O_CREAT), P(0600), P(0));
	TRY("a memfd", SYS_memfd_create, S("escape"), P(0));
	TRY("shared memory", SYS_mmap, P(0), P(4096), P(3), P(MAP_SHARED | MAP_ANONYMOUS), P(-1), P(0));
	TRY("fork", SYS_fork);
	TRY("clone as fork", SYS_clone, P(SIGCHLD), P(0), P(0), P(0), P(0));
	TRY("a child of the supervisor", SYS_clone, P(CLONE_VM | CLONE_PARENT | SIGCHLD), P(0), P(0), P(0), P(0));
	TRY("clone3", SYS_clone3, DATA, put(clone3, 64), P(64));
	TRY("kill by the x32 ABI", 0x40000000 | SYS_kill, P(-1), P(0));
	for (size_t i = 0; i < sizeof(clones) / sizeof(clones[0]); i++) {
		char name[64];

		snprintf(name, sizeof(name), "unshare %x", clones[i]);
		TRY(name, SYS_unshare, P(clones[i]));
		snprintf(name, sizeof(name), "clone %x", clones[i]);
		TRY(name, SYS_clone, P(CLONE_VM | CLONE_VFORK | clones[i] | SIGCHLD), P(0), P(0), P(0), P(0));
	}
	TRY("setns", SYS_setns, P(0), P(0));
	TRY("mount", SYS_mount, S("none"), S("/tmp"), S("tmpfs"), P(0), P(0));
	TRY("umount", SYS_umount2, S("/tmp"), P(2));
	TRY("remount", SYS_mount, S("none"), S("/"), P(0), P(32), P(0));
	TRY("pivot_root", SYS_pivot_root, S("/tmp"), S("/tmp"));
	TRY("chroot", SYS_chroot, S("/tmp"));
	TRY("fsopen", SYS_fsopen, S("tmpfs"), P(0));
	TRY("open_tree", SYS_open_tree, P(AT_FDCWD), S("/"), P(1));
	TRY("mount_setattr", SYS_mount_setattr, P(AT_FDCWD), S("/"), P(0), OUT, P(32));
	TRY("mknod", SYS_mknodat, P(AT_FDCWD), S("/tmp/mem"), P(S_IFCHR | 0600), P(0x101));
	TRY("open_by_handle_at", SYS_open_by_handle_at, P(AT_FDCWD), OUT, P(0));
	TRY("setuid", SYS_setuid, P(0x7fff0000));
	TRY("setgid", SYS_setgid, P(0x7fff0000));
	TRY("setgroups", SYS_setgroups, P(1), OUT);
	TRY("capset", SYS_capset, DATA, put(&header, 8), DATA, put(capabilities, 24));
	TRY("outlive the supervisor", SYS_prctl, P(PR_SET_PDEATHSIG), P(0));
	TRY("forget children", SYS_rt_sigaction, P(SIGCHLD), OUT, P(0), P(8));
	TRY("its own processors", SYS_sched_setaffinity, P(0), P(8), OUT);
	TRY("its own niceness", SYS_setpriority, P(0), P(0), P(-20));
	TRY("bpf", SYS_bpf, P(0), OUT, P(64));
	TRY("perf_event_open", SYS_perf_event_open, OUT, P(0), P(-1), P(-1), P(0));
	TRY("io_uring_setup", SYS_io_uring_setup, P(1), OUT);
	TRY("userfaultfd", SYS_userfaultfd, P(1));
	TRY("keyctl", SYS_keyctl, P(0), P(-3), P(1));
	TRY("add_key", SYS_add_key, S("user"), S("escape"), S("x"), P(1), P(-3));
	TRY("the kernel's log", SYS_syslog, P(3), OUT, P(512));
	TRY("modify_ldt", SYS_modify_ldt, P(0), OUT, P(512));
	TRY("init_module", SYS_init_module, OUT, P(512), S(""));
	TRY("reboot", SYS_reboot, P(0xfee1dead), P(672274793), P(0), P(0));
	TRY("sethostname", SYS_sethostname, S("escape"), P(6));
	TRY("settimeofday", SYS_settimeofday, OUT, P(0));
	TRY("iopl", SYS_iopl, P(3));
	TRY("swapoff", SYS_swapoff, S("/tmp"));
	TRY("acct", SYS_acct, S("/tmp/acct"));
	TRY("remap_file_pages", SYS_remap_file_pages, P(0), P(4096), P(0), P(1), P(0));
	TRY("mremap", SYS_mremap, OUT, P(4096), P(8192), P(1), P(0));
	kernel_resources();
	files_of_others();
	newer_calls();
	sockets_of_the_client();
	core_dumps();
}

static long results[MOST];

/* Makes the calls, and says what each has returned. */
static void make_calls(void)
{
	cl_int e = run("attempt", 3, (void *[]){ calls, data, results }, (size_t[]){ sizeof(calls), sizeof(data), sizeof(results) }, n_calls);

	if (e)
		die("attempt", e);
	for (int i = 0; i < n_calls; i++)
		if (strncmp(names[i], ALLOWED, strlen(ALLOWED)))
			printf("%s: %ld\n", names[i], results[i]);
}

static int map_again(void)
{
	enum { PAGE = 4096, PART = 2 << 20 };
	static char text[1 << 18];
	/* Where nothing is mapped. */
	long free = 0x200000000000;
	cl_int e = run("mappings", 1, (void *[]){ text }, (size_t[]){ sizeof(text) }, sizeof(text));

	if (e)
		die("mappings", e);
	for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"), free += 8l * PART) {
		long start, end, copy;
		char name[64], access[5];

		if (sscanf(line, "%lx-%lx %4s", &start, &end, access) != 3 || access[3] != 's')
			continue;
		copy = free + (end & (PART - 1));
#define OF(what) (snprintf(name, sizeof(name), what " of %lx", start), name)
		TRY(OF("last page"), SYS_mremap, P(end - PAGE), P(0), P(PAGE), P(MREMAP_MAYMOVE | MREMAP_FIXED), P(copy));
		TRY(OF("beyond its copy"), SYS_mremap, P(copy), P(0), P(PART), P(MREMAP_MAYMOVE | MREMAP_FIXED), P(copy + 2 * PART));
		TRY(OF("beyond the end"), SYS_mremap, P(end - PAGE), P(0), P(PART), P(MREMAP_MAYMOVE | MREMAP_FIXED), P(copy + 4 * PART));
	}
	make_calls();
	return 0;
}

static int try_all(char **v)
{
	const char *elsewhere[] = { "/etc/shadow", "/etc/passwd", "/root", "/home", "/var", "/run", "/boot", "/mnt", "/srv", "/dev/kmsg", "/dev/mem",
		"/dev/kvm", "/dev/fuse", "/dev/zero", "/dev/ptmx", "/dev/tty", "/dev/console", "/dev/vda", "/dev/loop0", "/sys/kernel", "/sys/fs",
		"/sys/firmware", "/proc/kcore", "/proc/kmsg" };
	const char *unchanging[] = { "/escape", "/usr/escape", "/usr/bin/env", "/etc/escape", "/etc/ld.so.cache", "/etc/OpenCL/escape", "/dev/escape",
		"/sys/devices/system/cpu/cpu1/online", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger",
		"/proc/self/uid_map", "/proc/self/oom_score_adj" };

	/* Before what may change the worker itself. */
	sockets(v[2]);
	for (char **file = v + 4; *file; file++) {
		open_file(*file, O_RDONLY);
		open_file(*file, O_RDWR);
	}
	for (size_t i = 0; i < sizeof(elsewhere) / sizeof(elsewhere[0]); i++)
		open_file(elsewhere[i], O_RDONLY);
	for (size_t i = 0; i < sizeof(unchanging) / sizeof(unchanging[0]); i++)
		open_file(unchanging[i], O_WRONLY | (strstr(unchanging[i], "escape") ? O_CREAT : 0));
	processes("the server", atol(v[0]));
	processes("a neighbour", atol(v[1]));
	TRY("kill all processes", SYS_kill, P(-1), P(SIGKILL));
	kernel_parts(atol(v[3]));
	make_calls();
	return 0;
}

/* The socket to the server, which the client library has open. */
static int own_socket(void)
{
	for (int fd = 3; fd < 256; fd++) {
		struct sockaddr_un peer;
		socklen_t length = sizeof(peer);

		if (!getpeername(fd, (void *)&peer, &length) && peer.sun_family == AF_UNIX)
			return fd;
	}
	die("no socket", 0);
	return -1;
}

static int pass(const char *path)
{
	long results[2] = { 0 };
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec vector = { &byte, 1 };
	struct msghdr message = { .msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	int file = open(path, O_RDONLY);
	cl_int e;

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &file, sizeof(int));
	if (file < 0 || sendmsg(own_socket(), &message, 0) != 1)
		die("not passed", 0);
	if ((e = run("take", 1, (void *[]){ results }, (size_t[]){ sizeof(results) }, 0)))
		die("take", e);
	printf("received: %ld\nmode: %ld\n", results[0], results[1]);
	return 0;
}

int main(int n, char **v)
{
	long results[8] = { 0 };
	char byte;
	cl_int e = 0;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (n < 2)
		return 2;
	begin();
	if (!strcmp(v[1], "come"))
		return 0;
	if (!strcmp(v[1], "try") && n > 6)
		return try_all(v + 2);
	if (!strcmp(v[1], "again"))
		return map_again();
	if (!strcmp(v[1], "fill")) {
		char path[16] = "/tmp/fill";

		e = run("fill", 2, (void *[]){ path, results }, (size_t[]){ sizeof(path), sizeof(results) }, 0);
		printf("private MiB: %ld\nshared: %ld\nfile MiB: %ld\nfiles: %ld\nKiB in sockets: %ld\nprocesses: %ld\nMiB to read: %ld\nsignals: %ld\n",
		       results[0], results[1], results[2], results[3], results[4], results[5], results[6], results[7]);
	} else if (!strcmp(v[1], "pass") && n > 2) {
		return pass(v[2]);
	} else if (!strcmp(v[1], "crash") || !strcmp(v[1], "old")) {
		results[0] = 8;
		e = run(v[1], 1, (void *[]){ results }, (size_t[]){ sizeof(results) }, 0);
		if (!e)
			puts("survived");
	} else if (!strcmp(v[1], "many")) {
		run("many", 1, (void *[]){ results }, (size_t[]){ sizeof(results) }, 0);
	} else if (!strcmp(v[1], "orphan")) {
		e = run("orphan", 1, (void *[]){ results }, (size_t[]){ sizeof(results) }, 0);
		printf("another group: %ld\n", results[0]);
	} else if (!strcmp(v[1], "replace")) {
		e = run("replace", 1, (void *[]){ results }, (size_t[]){ sizeof(results) }, 0);
		printf("another program: %ld\nthe same by another call: %ld\n", results[0], results[1]);
	} else if (!strcmp(v[1], "linger")) {
		e = run("linger", 1, (void *[]){ results }, (size_t[]){ sizeof(results) }, 0);
		puts(results[0] > 0 ? "lingers" : "can't");
		while (read(0, &byte, 1) > 0)
			;
	} else if (!strcmp(v[1], "deaf") || !strcmp(v[1], "chatter")) {
		/* The answer gets lost, as its descriptor does. */
		cl_kernel kernel = clCreateKernel(program, !strcmp(v[1], "deaf") ? "deafen" : v[1], &e);
		cl_mem buffer = clCreateBuffer(context, 0, sizeof(results), NULL, &e);
		size_t one = 1;

		clSetKernelArg(kernel, 0, sizeof(buffer), &buffer);
		e = clEnqueueNDRangeKernel(queue, kernel, 1, NULL, &one, &one, 0, NULL, NULL);
		clFlush(queue);
		puts(v[1]);
		while (read(0, &byte, 1) > 0)
			;
		_exit(0);
	} else {
		return 2;
	}
	return e ? 1 : 0;
}
