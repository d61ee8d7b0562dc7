/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * mkzone FILE MIB VMS: a zone with a file system and that many VMs invited, for tests that need no host side. With
 * a last argument "ro=N", member N may not write; with "grant=N" it is confined to the directory /sub, with 10 MiB and 20 inodes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tfs.h"

void *tfs_os_alloc(tmb_u64 bytes)
{
	return calloc(1, bytes);
}
void tfs_os_free(void *p)
{
	free(p);
}
void tfs_os_relax(void)
{
	__builtin_ia32_pause();
}
void tfs_os_wait(struct tfs *fs, tmb_u32 round)
{
	(void)fs;
	usleep(20 * (round < 50 ? round : 50));
}
/* There is no other member, so nothing waits. */
bool tfs_os_sleep(struct tfs *fs, tmb_u32 *word, tmb_u32 value, tmb_u64 ns, bool killable)
{
	(void)fs, (void)word, (void)value, (void)ns, (void)killable;
	return false;
}
void tfs_os_wake(struct tfs *fs, tmb_u32 *word)
{
	(void)fs, (void)word;
}
void tfs_os_yield(void)
{
}
bool tfs_os_killed(struct tfs *fs)
{
	(void)fs;
	return false;
}
void tfs_os_waiting(struct tfs *fs, tmb_u32 member, bool answers, tmb_u64 seconds)
{
	(void)fs, (void)member, (void)answers, (void)seconds;
}
static tmb_u64 clock_ns(clockid_t c)
{
	struct timespec t;

	clock_gettime(c, &t);
	return (tmb_u64)t.tv_sec * 1000000000u + (tmb_u64)t.tv_nsec;
}
tmb_u64 tfs_os_clock(void)
{
	return clock_ns(CLOCK_MONOTONIC);
}
tmb_s64 tfs_os_now(void)
{
	return (tmb_s64)clock_ns(CLOCK_REALTIME);
}
tmb_u32 tfs_os_cpu(void)
{
	return (tmb_u32)sched_getcpu();
}
void tfs_os_ring(struct tfs *fs, tmb_u32 member)
{
	(void)fs;
	(void)member;
}
void tfs_os_flush(const void *p, tmb_u64 len)
{
	(void)p;
	(void)len;
}
void tfs_os_drain(void)
{
}
void tfs_os_damage(struct tfs *fs, const char *what, tmb_u64 a, tmb_u64 b)
{
	(void)fs;
	fprintf(stderr, "damage: %s (%llu, %llu)\n", what, (unsigned long long)a, (unsigned long long)b);
}

int main(int argc, char **argv)
{
	static const tmb_u8 uuid[16] = {0x7a, 0x6f, 0x6e, 0x65, 1, 2, 0x43, 4, 0x85, 6, 7, 8, 9, 10, 11, 12};
	size_t bytes, vms, files = 2 << 20;
	int fd, err, ro = -1, grant = -1;
	tmb_u8 *zone;

	if (argc < 4)
		return 2;
	bytes = (size_t)atol(argv[2]) << 20;
	vms = (size_t)atol(argv[3]);
	if (argc > 4 && !strncmp(argv[4], "ro=", 3))
		ro = atoi(argv[4] + 3);
	if (argc > 4 && !strncmp(argv[4], "grant=", 6))
		grant = atoi(argv[4] + 6);
	fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (fd < 0 || ftruncate(fd, (off_t)bytes)) {
		perror(argv[1]);
		return 1;
	}
	zone = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (zone == MAP_FAILED) {
		perror("mmap");
		return 1;
	}
	struct tmb_zone_header *h = (void *)zone;
	h->version = TMB_ZONE_VERSION;
	h->header_size = sizeof(*h);
	memcpy(h->uuid, uuid, 16);
	h->size = bytes;
	strcpy(h->name, "test");
	h->n_areas = 1;
	h->n_members = TMB_MAX_MEMBERS;
	h->members_off = sizeof(*h);
	h->member_size = sizeof(struct tmb_member);
	h->areas[0].type = TMB_AREA_FILES;
	h->areas[0].offset = files;
	h->areas[0].length = bytes - files;
	strcpy(h->areas[0].name, "files");
	struct tmb_member *m = (void *)(zone + h->members_off);
	for (size_t i = 0; i < vms; i++) {
		m[i].role = TMB_ROLE_VM;
		m[i].rights = (int)i == ro ? 0 : TMB_RIGHT_WRITE;
		snprintf(m[i].name, sizeof(m[i].name), "vm%zu", i);
		m[i].state_epoch = tmb_state_epoch(TMB_MEMBER_INVITED, 0);
	}
	err = tfs_mkfs(zone + files, bytes - files, uuid, "test", 0x1234567, files, 0, 0, 0777, 0);
	if (err) {
		fprintf(stderr, "mkfs: %d\n", err);
		return 1;
	}
	if (grant >= 0) {
		struct tfs_create sub = { .mode = S_IFDIR | 0777 };
		struct tfs fs = {};
		struct tfs_handle made, root = { TFS_ROOT_INO, 0 };

		err = tfs_open(&fs, zone + files, bytes - files, NULL, 0, 0);
		if (!err)
			err = tfs_create(&fs, root, "sub", 3, &sub, &made);
		if (!err)
			err = tfs_grant(&fs, (tmb_u32)grant, "tenant", 6, 2560, 20, made);
		if (err) {
			fprintf(stderr, "grant: %d\n", err);
			return 1;
		}
	}
	tmb_store_release(&h->magic, TMB_ZONE_MAGIC);
	return 0;
}
