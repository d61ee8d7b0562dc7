/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A VM without a kernel: this program sets its registers and page tables, so it does what no kernel would, in user mode or not, in any paging mode. It
 * prints a line for each claim. The services kv and odd must be open to it.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../linux/visit.h"

#define MEMORY (4 << 20)
#define ROOT 0x1000
#define CODE 0x30000
#define REQUEST 0x20000
#define WINDOW 0x40000
#define OWN 0x10000
#define SAVED 0x11000
#define REPORT 0xd0000000u /* no memory: a store exits to this program */
#define GATE 0x200050000000ull
#define CALLS 1000000

enum { END_BACK, END_LANDED, END_DOWN };

struct end {
	int how;
	uint32_t status; /* r9d, or eax at the landing */
	uint64_t result;
};

struct bound {
	uint32_t gate, service, enter, exit;
};

static uint8_t *memory;
static int vcpu;
static struct kvm_run *run;

#define CHECK(what)                                                                                      \
	do {                                                                                             \
		if (!(what)) {                                                                           \
			printf("tiny: line %d: not so: %s (errno %d)\n", __LINE__, #what, errno);        \
			exit(1);                                                                         \
		}                                                                                        \
	} while (0)

static void put64(uint64_t at, uint64_t value)
{
	memcpy(memory + at, &value, 8);
}

/* The VM's own tables of four levels: its memory at 0, REPORT, and the two pages of the gate. */
static void write_tables(void)
{
	put64(ROOT, 0x2000 | 7);
	put64(ROOT + 8 * (GATE >> 39 & 511), 0x4000 | 7);
	put64(0x2000, 0x3000 | 7);
	put64(0x2000 + 8 * 3, 0x7000 | 7);
	put64(0x3000, 0x87);
	put64(0x3000 + 8, 0x200087);
	put64(0x4000 + 8 * (GATE >> 30 & 511), 0x5000 | 7);
	put64(0x5000 + 8 * (GATE >> 21 & 511), 0x6000 | 7);
	put64(0x6000, OWN | 7);
	put64(0x6000 + 8, SAVED | 7);
	put64(0x7000 + 8 * (REPORT >> 21 & 511), REPORT | 0x87);
}

static struct kvm_segment segment(int selector, int type, int dpl, int bits64)
{
	return (struct kvm_segment){
		.selector = selector, .type = type, .present = 1, .s = 1, .dpl = dpl, .l = bits64, .db = !bits64, .g = 1, .limit = 0xffffffff
	};
}

/* 64-bit mode at this level. */
static void long_mode(int dpl, uint64_t root)
{
	struct kvm_vcpu_events events = { 0 };
	struct kvm_debugregs none = { .dr7 = 0x400, .dr6 = 0xffff0ff0 };
	struct kvm_sregs s;

	CHECK(!ioctl(vcpu, KVM_SET_VCPU_EVENTS, &events) && !ioctl(vcpu, KVM_SET_DEBUGREGS, &none) && !ioctl(vcpu, KVM_GET_SREGS, &s));
	s.cr0 = 0x80000031;
	s.cr4 = 0x620;
	s.cr3 = root;
	s.efer = 0x500;
	s.cs = segment(dpl ? 0x33 : 0x10, 11, dpl, 1);
	s.ss = s.ds = s.es = segment(dpl ? 0x2b : 0x18, 3, dpl, 0);
	CHECK(!ioctl(vcpu, KVM_SET_SREGS, &s));
}

static struct end go(struct kvm_regs *r)
{
	struct end end = { END_DOWN, 0, 0 };

	CHECK(!ioctl(vcpu, KVM_SET_REGS, r));
	while (ioctl(vcpu, KVM_RUN, 0) < 0)
		CHECK(errno == EINTR || errno == EAGAIN);
	if (run->exit_reason == KVM_EXIT_MMIO) {
		CHECK(run->mmio.is_write && (run->mmio.phys_addr & ~8ull) == REPORT);
		end.how = run->mmio.phys_addr == REPORT ? END_BACK : END_LANDED;
		memcpy(&end.status, run->mmio.data, 4);
		run->immediate_exit = 1;
		CHECK(ioctl(vcpu, KVM_RUN, 0) < 0 && errno == EINTR);
		run->immediate_exit = 0;
	} else if (run->exit_reason != KVM_EXIT_SHUTDOWN && run->exit_reason != KVM_EXIT_HLT && run->exit_reason != KVM_EXIT_FAIL_ENTRY) {
		printf("tiny: exit %u, suberror %u\n", run->exit_reason, run->internal.suberror);
		exit(1);
	}
	CHECK(!ioctl(vcpu, KVM_GET_REGS, r));
	end.result = r->r8;
	return end;
}

/* The client's half of the gate: reports what comes back, and where it lands. */
static void write_own(const struct bound *b)
{
	static const uint8_t landed[] = { 0xba, 0, 0, 0, 0xd0, 0x89, 0x42, 0x08 }, back[] = { 0xba, 0, 0, 0, 0xd0, 0x44, 0x89, 0x0a };
	static const uint8_t vmfunc[] = { 0x0f, 0x01, 0xd4 };

	memset(memory + OWN, 0xcc, 4096);
	memcpy(memory + OWN + TMB_VISIT_LANDING, landed, sizeof(landed));
	memcpy(memory + OWN + b->enter - 3, vmfunc, 3);
	memcpy(memory + OWN + b->exit + TMB_VISIT_EXIT_SIZE, back, sizeof(back));
}

/* Executes VMFUNC before byte `next` of the gate's page. */
static struct end enter(const struct bound *b, uint32_t next, uint32_t index, uint32_t edx, uint64_t call, uint64_t a, uint64_t flags)
{
	struct kvm_regs r = { .rip = GATE + next - 3, .rcx = index, .rdx = edx, .rdi = call, .rsi = a, .rsp = 0x38000, .rflags = 2 | flags };

	write_own(b);
	memcpy(memory + OWN + next - 3, (uint8_t[]){ 0x0f, 0x01, 0xd4 }, 3);
	return go(&r);
}

static struct end call(const struct bound *b, uint64_t call, uint64_t a)
{
	long_mode(3, ROOT);
	return enter(b, b->enter, b->gate, 0, call, a, 0x200);
}

static void still_serves(const struct bound *b, uint64_t nothing)
{
	struct end e;

	/* The service's entry is valid in no memory but the gate's. */
	long_mode(3, ROOT);
	e = enter(b, b->enter + TMB_VISIT_ENTER_SIZE, b->service, 0, nothing, 0, 0x200);
	CHECK(e.how == END_DOWN);
	e = call(b, nothing, 4711);
	CHECK(e.how == END_BACK && e.status == TMB_VISIT_DONE && e.result == 4711);
}

static struct bound bind_to(const char *name)
{
	struct tmb_visit_request *q = (void *)(memory + REQUEST);
	struct kvm_regs r;

	memcpy(memory + CODE, (uint8_t[]){ 0x0f, 0x01, 0xc1, 0xf4 }, 4); /* vmcall; hlt */
	do {
		memset(q, 0, sizeof(*q));
		q->version = TMB_VISIT_VERSION;
		q->operation = TMB_VISIT_BIND;
		q->root = ROOT;
		q->gate = GATE;
		q->window = WINDOW;
		strcpy(q->name, name);
		long_mode(0, ROOT);
		memset(&r, 0, sizeof(r));
		r.rip = CODE;
		r.rflags = 2;
		r.rax = TMB_VISIT_HYPERCALL;
		r.rbx = REQUEST;
		go(&r);
		if (r.rax)
			usleep(50000);
	} while ((int64_t)r.rax == -EAGAIN || (int64_t)r.rax == -ENOENT || (int64_t)r.rax == -1000);
	CHECK(r.rax == 0);
	return (struct bound){ TMB_VISIT_GATE_INDEX + q->binding, q->index, TMB_VISIT_ENTER(q->index), TMB_VISIT_EXIT_AT(q->index) };
}

static void odd_calls(const struct bound *b)
{
	uint64_t before = call(b, 0, 0).result, ended = call(b, 1, 0).result;
	int i;

	for (i = 2; i <= 15; i++) {
		struct end e = call(b, i, 0);
		uint32_t expected = i == 2 ? TMB_VISIT_TOO_LONG : i == 7 ? TMB_VISIT_EXIT_REASON + 10 : i == 9 ? TMB_VISIT_EXIT_REASON + 18 : TMB_VISIT_FAULT;

		printf("tiny: call %d: end %d, status %#x\n", i, e.how, e.status);
		CHECK(e.how == END_LANDED && e.status == expected);
	}
	CHECK(call(b, 0, 0).result == before + 15); /* call 14 counts itself out again */
	CHECK(call(b, 1, 0).result == ended + 14);
	printf("claim: a service that loops, faults or leaves its context ends the visit with an error, and serves on\n");
}

static void everywhere(const struct bound *b, uint64_t nothing)
{
	uint32_t edx[] = { 0, b->service, b->gate, 0x1ff }, index, at, i;
	int dpl;

	for (dpl = 0; dpl <= 3; dpl += 3) {
		for (index = 1; index < 514; index++) {
			long_mode(dpl, ROOT);
			CHECK(enter(b, 0x800, index, 0, 0, 0, 2).how == (index == b->gate || index == b->gate + 1 ? END_LANDED : END_DOWN));
		}
		for (at = b->enter - 4; at < b->exit + 20; at += at == b->enter + 20 ? b->exit - b->enter - 24 : 1) {
			for (i = 0; i < 4; i++) {
				if (at - 3 < TMB_VISIT_LANDING + 8)
					continue;
				long_mode(dpl, ROOT);
				enter(b, at, b->gate, edx[i], nothing, 0, 2);
			}
			still_serves(b, nothing);
		}
	}
	printf("claim: a client that enters its gate at any byte and by any index, with any privilege, gets nowhere\n");
}

/* A breakpoint at each byte of the page: the exception ends the visit there, in the gate or in the door. */
static void stopped_everywhere(const struct bound *b, uint64_t nothing)
{
	uint32_t at, stopped = 0;

	for (at = 0; at < 0xd20; at += at == 0x120 ? b->enter - 0x120 - 4 : 1) {
		struct kvm_debugregs d = { .dr7 = 0x401, .dr6 = 0xffff0ff0 };
		struct end e;

		if (at == b->enter - 3)
			continue;
		long_mode(3, ROOT);
		d.db[0] = GATE + at;
		CHECK(!ioctl(vcpu, KVM_SET_DEBUGREGS, &d));
		e = enter(b, b->enter, b->gate, 0, nothing, 1, 0x200);
		CHECK(e.how != END_BACK || (e.status == TMB_VISIT_DONE && e.result == 1));
		if (e.how == END_LANDED) {
			CHECK(e.status == TMB_VISIT_FAULT);
			stopped++;
		}
		still_serves(b, nothing);
	}
	CHECK(stopped > 60);
	printf("claim: a visit that an exception ends at any instruction of gate and door leaves the service to others (%u instructions)\n", stopped);
}

/* Other roots, and modes in which the gate's bytes would be other instructions. */
static void other_modes(const struct bound *b, uint64_t nothing)
{
	static uint8_t saved[4096];
	struct kvm_sregs s;
	struct kvm_regs r;
	uint32_t table, at;

	/* The window has tables of the client's making; in the gate's context they are no memory. */
	memcpy(memory + WINDOW, memory + ROOT, 4096);
	long_mode(0, WINDOW);
	CHECK(enter(b, b->enter, b->gate, 0, nothing, 0, 2).how == END_LANDED);
	still_serves(b, nothing);
	/* PAE, with the root of four levels as each of the tables of the third level; and no paging at all. */
	memcpy(saved, memory + ROOT, 4096);
	for (table = 0; table < 5; table++) {
		for (at = 0; at < 3; at++) {
			uint32_t offset = (uint32_t[]){ b->enter, b->enter + 7, b->exit }[at];
			uint32_t linear = table << 30 | (uint32_t)(GATE >> 39 & 511) << 21 | (uint32_t)(GATE >> 30 & 511) << 12 | offset;

			long_mode(0, ROOT);
			CHECK(!ioctl(vcpu, KVM_GET_SREGS, &s));
			s.efer = 0;
			s.cr0 = table < 4 ? 0x80000031 : 0x31;
			s.cr3 = 0x8000;
			s.cs = segment(0x10, 11, 0, 0);
			CHECK(!ioctl(vcpu, KVM_SET_SREGS, &s));
			for (int i = 0; i < 4; i++)
				put64(0x8000 + 8 * i, ROOT | 1);
			memset(memory + ROOT, 0, 4096);
			put64(ROOT + 8 * (GATE >> 39 & 511), 0x87); /* 2 MiB: the VM's own memory */
			if (table == 4)
				linear = 0x9000 + offset % 4096;
			memcpy(memory + (linear & 0x1fffff) - 3, (uint8_t[]){ 0x0f, 0x01, 0xd4, 0xf4 }, 4);
			memset(&r, 0, sizeof(r));
			r.rip = linear - 3;
			r.rcx = b->gate;
			r.rflags = 2;
			CHECK(go(&r).how == END_DOWN);
			CHECK(run->exit_reason == KVM_EXIT_SHUTDOWN);
			memcpy(memory + ROOT, saved, 4096);
			memset(memory + 0x8000, 0, 0x4000);
			still_serves(b, nothing);
		}
	}
	printf("claim: a client with other page tables or in another mode does not reach the gate\n");
}

/* counter: SAVED; the two time stamps behind it. The loop's ten instructions count as the call's. */
__asm__(".pushsection .rodata\n"
	"own: .skip 0x100, 0xcc\n"
	"rdtsc\n shl $32, %rdx\n or %rdx, %rax\n mov %rax, own+0x1008(%rip)\n"
	"1: mov $3, %edi\n mov own+0x1000(%rip), %rsi\n xor %eax, %eax\n .byte 0xb9\n own_gate: .long 0\n .byte 0xe9\n own_enter: .long 0\n"
	"own_back: test %r9d, %r9d\n jnz 2f\n cmp own+0x1000(%rip), %r8\n jne 2f\n decq own+0x1000(%rip)\n jnz 1b\n"
	"rdtsc\n shl $32, %rdx\n or %rdx, %rax\n mov %rax, own+0x1010(%rip)\n"
	"2: mov $0xd0000000, %edx\n mov %r9d, (%rdx)\n"
	"own_end: .popsection");
extern const uint8_t own[], own_gate[], own_enter[], own_back[], own_end[];

static uint64_t exits_of(int vm)
{
	char path[128], text[32] = "";
	int f;

	snprintf(path, sizeof(path), "/sys/kernel/debug/kvm/%d-%d/exits", getpid(), vm);
	f = open(path, O_RDONLY);
	CHECK(f >= 0 && read(f, text, sizeof(text) - 1) > 0);
	close(f);
	return strtoull(text, NULL, 10);
}

static uint64_t repeat(const struct bound *b, uint64_t calls)
{
	struct kvm_regs r = { .rip = GATE + 0x100, .rsp = 0x38000, .rflags = 0x202 };
	int32_t to_enter = (int32_t)(b->enter - 3) - (int32_t)(own_enter - own + 4);
	int32_t to_back = (int32_t)(own_back - own) - (int32_t)(b->exit + TMB_VISIT_EXIT_SIZE + 5);
	struct end e;

	long_mode(3, ROOT);
	write_own(b);
	memcpy(memory + OWN + 0x100, own + 0x100, own_end - own - 0x100);
	memcpy(memory + OWN + (own_gate - own), &b->gate, 4);
	memcpy(memory + OWN + (own_enter - own), &to_enter, 4);
	memory[OWN + b->exit + TMB_VISIT_EXIT_SIZE] = 0xe9;
	memcpy(memory + OWN + b->exit + TMB_VISIT_EXIT_SIZE + 1, &to_back, 4);
	put64(SAVED, calls);
	e = go(&r);
	CHECK(e.how == END_BACK && e.status == 0 && *(uint64_t *)(memory + SAVED) == 0);
	return *(uint64_t *)(memory + SAVED + 16) - *(uint64_t *)(memory + SAVED + 8);
}

static void measure(const struct bound *b, int vm)
{
	uint64_t least = ~0ull, before, after, one, took;
	int i;

	for (i = 0; i < 20; i++) {
		one = repeat(b, 100) / 100;
		least = one < least ? one : least;
	}
	printf("instructions of a call: %llu\n", (unsigned long long)least);
	before = exits_of(vm);
	took = repeat(b, CALLS);
	after = exits_of(vm);
	printf("exits of a million calls, all of them: %llu in %llu instructions\n", (unsigned long long)(after - before), (unsigned long long)took);
	printf("claim: a million calls\n");
}

int main(void)
{
	struct kvm_userspace_memory_region region = { .memory_size = MEMORY };
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), vm = ioctl(kvm, KVM_CREATE_VM, 0);
	struct bound kv, odd;
	struct {
		struct kvm_cpuid2 head;
		struct kvm_cpuid_entry2 entries[100];
	} cpuid = { .head.nent = 100 };

	setvbuf(stdout, NULL, _IOLBF, 0);
	CHECK(vm >= 0);
	memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	region.userspace_addr = (uintptr_t)memory;
	CHECK(!ioctl(vm, KVM_SET_TSS_ADDR, 0xfffbd000) && !ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region));
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	CHECK(vcpu >= 0 && !ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid) && !ioctl(vcpu, KVM_SET_CPUID2, &cpuid));
	run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	CHECK(run != MAP_FAILED);
	write_tables();
	kv = bind_to("kv");
	odd = bind_to("odd");
	still_serves(&kv, 3);
	CHECK(call(&kv, 99, 0).status == TMB_VISIT_NO_CALL);
	printf("claim: a call is done, and one that does not exist is an error\n");
	odd_calls(&odd);
	measure(&kv, vm);
	stopped_everywhere(&kv, 3);
	other_modes(&kv, 3);
	everywhere(&kv, 3);
	printf("tiny: done\n");
	return 0;
}
