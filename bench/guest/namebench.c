// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Rates of operations on names in one directory: namebench DIR COUNT. Prints "create RATE", "stat RATE", "rename RATE",
 * "readdir RATE", "unlink RATE", in names per second. Readdir counts each name of repeated listings of the whole directory.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void fail(const char *what, const char *name)
{
	fprintf(stderr, "namebench: %s %s: %s\n", what, name, strerror(errno));
	exit(1);
}

static void report(const char *what, long count, double since)
{
	printf("%s %.1f\n", what, (double)count / (now() - since));
}

static long list(const char *path)
{
	DIR *dir = opendir(path);
	long n = 0;

	if (!dir)
		fail("opendir", path);
	for (;;) {
		errno = 0;
		struct dirent *entry = readdir(dir);

		if (!entry)
			break;
		if (entry->d_name[0] != '.')
			n++;
	}
	if (errno)
		fail("readdir", path);
	closedir(dir);
	return n;
}

int main(int argc, char **argv)
{
	long count = argc > 2 ? atol(argv[2]) : 0, seen = 0;
	char name[64], other[64];
	struct stat st;
	double since;

	if (argc != 3 || count < 1) {
		fprintf(stderr, "usage: namebench DIR COUNT\n");
		return 2;
	}
	if (mkdir(argv[1], 0755) || chdir(argv[1]))
		fail("mkdir", argv[1]);
	since = now();
	for (long i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "file-%ld", i);
		int fd = open(name, O_CREAT | O_EXCL | O_WRONLY, 0644);

		if (fd < 0)
			fail("create", name);
		close(fd);
	}
	report("create", count, since);
	since = now();
	for (long i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "file-%ld", i);
		if (stat(name, &st))
			fail("stat", name);
	}
	report("stat", count, since);
	since = now();
	for (int round = 0; round < 5; round++)
		seen += list(".");
	if (seen != 5 * count) {
		fprintf(stderr, "namebench: readdir saw %ld names, not %ld\n", seen, 5 * count);
		return 1;
	}
	report("readdir", seen, since);
	since = now();
	for (long i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "file-%ld", i);
		snprintf(other, sizeof(other), "name-%ld", i);
		if (rename(name, other))
			fail("rename", name);
	}
	report("rename", count, since);
	since = now();
	for (long i = 0; i < count; i++) {
		snprintf(name, sizeof(name), "name-%ld", i);
		if (unlink(name))
			fail("unlink", name);
	}
	report("unlink", count, since);
	if (chdir("/") || rmdir(argv[1]))
		fail("rmdir", argv[1]);
	return 0;
}
