// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * damage SECONDS SEED: what the kernel of a hostile VM does to the zone of its accelerator. Writes nonsense, and what makes sense to the server at the
 * wrong moment, over all of the zone, and rings every doorbell as fast as it can. Says 'damaged', how often it wrote, and how often it rang.
 *
 * As root of a guest: the zone is /dev/pmem0, written to behind the back of the driver; the doorbells are registers of the ivshmem device, which no
 * driver may have then (Linux keeps what a driver has for it).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
/* include/linux/fs.h */
#define BLKGETSIZE64 _IOR(0x12, 114, size_t)
/* zone/format/tombolo_calls.h: what the area begins with, where the channels' words are, and how many there may be. */
static const char magic[8] = "TMBCALLS";
#define CHANNEL_SIZE 16
#define WORDS 2048
#define CHANNELS 64
/* docs/specs/ivshmem-spec.rst of QEMU */
#define IVSHMEM "0x1af4\n0x1110\n"
#define DOORBELL 12
#define PEERS 8

static uint64_t state;

static uint64_t number(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static int reads(const char *folder, const char *name, char *text, size_t length)
{
	char path[512];
	int fd, n;

	snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/%s", folder, name);
	fd = open(path, O_RDONLY);
	n = fd < 0 ? -1 : (int)read(fd, text, length);
	close(fd);
	return n;
}

/* The registers of the ivshmem device. */
static volatile uint32_t *registers(void)
{
	DIR *all = opendir("/sys/bus/pci/devices");
	struct dirent *entry;

	while (all && (entry = readdir(all))) {
		char ids[32] = "", path[512];
		int vendor = reads(entry->d_name, "vendor", ids, 16), fd;
		void *at;

		if (vendor < 0 || reads(entry->d_name, "device", ids + vendor, 15) < 0 || strcmp(ids, IVSHMEM))
			continue;
		snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/resource0", entry->d_name);
		fd = open(path, O_RDWR);
		at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (at == MAP_FAILED)
			die(path);
		return at;
	}
	die("no ivshmem device");
	return NULL;
}

int main(int n, char **v)
{
	static _Alignas(PAGE) uint64_t page[PAGE / 8], header[PAGE / 8];
	volatile uint32_t *bells = registers();
	int zone = open("/dev/pmem0", O_RDWR | O_DIRECT);
	uint64_t size, area = 0, writes = 0, rings = 0;
	time_t end;

	if (n < 3)
		return 2;
	end = time(NULL) + atol(v[1]);
	state = strtoull(v[2], NULL, 0) * 0x9e3779b97f4a7c15u | 1;
	if (zone < 0 || ioctl(zone, BLKGETSIZE64, &size))
		die("/dev/pmem0");
	do {
		area += PAGE;
		if (pread(zone, header, PAGE, area) != PAGE)
			die("no area for calls");
	} while (memcmp(header, magic, sizeof(magic)));
	while (time(NULL) < end) {
		uint64_t where = number() % 4, at = area;

		/* The first page of a channel says that its client rang. */
		if (where == 0)
			at = number() % (size / PAGE) * PAGE;
		else if (where == 1)
			at = area + PAGE + number() % CHANNELS * header[CHANNEL_SIZE / 8] % (size - area - PAGE);
		if (at == area && number() % 8) {
			/* Words of channels that the server knows, in any order. */
			memcpy(page, header, PAGE);
			for (int i = 0; i < CHANNELS; i++)
				page[WORDS / 8 + i] = number() << 32 | number() % 7;
		} else {
			for (int i = 0; i < PAGE / 8; i++)
				page[i] = number() % 3 ? number() : number() % 8;
		}
		if (pwrite(zone, page, PAGE, at) != PAGE)
			die("write");
		writes++;
		for (uint32_t peer = 0; peer < PEERS; peer++, rings++)
			bells[DOORBELL / 4] = peer << 16;
	}
	printf("damaged: %llu writes, %llu rings\n", (unsigned long long)writes, (unsigned long long)rings);
	return 0;
}
