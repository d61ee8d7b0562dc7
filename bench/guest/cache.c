// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A cache of many small files as cargo, npm, pip, uv and ccache use theirs: cache use DIR COUNT MEMBER wants COUNT entries of the cache DIR, each
 * once, in an order of the member's own. For an entry it takes the flock(2) of the entry's folder (one of 16). One that is not there is written
 * to a temporary file and renamed to its name; then it is hard-linked into the member's own folder, and read there. Prints
 * "entries PER_SECOND" and "made COUNT", the entries that this member has made.
 * cache check DIR COUNT MEMBERS: each entry is there once and whole, each member's link leads to it, and no temporary file is left.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FOLDERS 16
#define MOST 16384

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void fail(const char *what, const char *name)
{
	fprintf(stderr, "cache: %s %s: %s\n", what, name, strerror(errno));
	exit(1);
}

static char *path(const char *format, ...)
{
	static char paths[4][512];
	static unsigned int turn;
	char *to = paths[turn++ % 4];
	va_list words;

	va_start(words, format);
	vsnprintf(to, sizeof paths[0], format, words);
	va_end(words);
	return to;
}

static void folder(const char *name)
{
	if (mkdir(name, 0777) && errno != EEXIST)
		fail("can't make", name);
}

/* Sizes as of headers and small sources: 100 bytes to 16 KiB. */
static size_t size_of(long entry)
{
	return 100 + (size_t)(entry * 2654435761u % (MOST - 100));
}

static unsigned char byte_at(long entry, size_t at)
{
	return (unsigned char)(entry * 7 + (long)at);
}

static void write_entry(const char *name, long entry)
{
	unsigned char bytes[MOST];
	size_t size = size_of(entry);
	int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);

	for (size_t i = 0; i < size; i++)
		bytes[i] = byte_at(entry, i);
	if (fd < 0 || write(fd, bytes, size) != (ssize_t)size || close(fd))
		fail("can't write", name);
}

static void read_entry(const char *name, long entry)
{
	unsigned char bytes[MOST];
	size_t size = size_of(entry);
	int fd = open(name, O_RDONLY);

	if (fd < 0 || read(fd, bytes, sizeof bytes) != (ssize_t)size)
		fail("can't read", name);
	close(fd);
	for (size_t i = 0; i < size; i++) {
		if (bytes[i] == byte_at(entry, i))
			continue;
		fprintf(stderr, "cache: %s has another byte at %zu than was written\n", name, i);
		exit(1);
	}
}

/* Returns how often this call made the entry. */
static int want(const char *dir, long entry, const char *member)
{
	char *name = path("%s/%ld/%ld", dir, entry % FOLDERS, entry);
	char *own = path("%s/of-%s/%ld", dir, member, entry);
	const char *lock = path("%s/%ld/lock", dir, entry % FOLDERS);
	const char *temporary = path("%s/%ld/.%ld.%s", dir, entry % FOLDERS, entry, member);
	int fd = open(lock, O_RDWR | O_CREAT, 0666), made = 0;

	if (fd < 0 || flock(fd, LOCK_EX))
		fail("can't lock", lock);
	unlink(own);
	/* Where flock(2) holds in each VM alone, an entry may also be replaced under the link, which virtiofs answers by the same error. */
	while (link(name, own)) {
		if (errno != ENOENT)
			fail("can't link", own);
		write_entry(temporary, entry);
		if (rename(temporary, name))
			fail("can't rename", temporary);
		made++;
	}
	read_entry(own, entry);
	close(fd);
	return made;
}

static void use(const char *dir, long count, const char *member)
{
	long first = strtol(member, NULL, 10) * 37 % count, made = 0;
	double start = now();

	folder(dir);
	for (int i = 0; i < FOLDERS; i++)
		folder(path("%s/%d", dir, i));
	folder(path("%s/of-%s", dir, member));
	for (long i = 0; i < count; i++)
		made += want(dir, (first + i) % count, member);
	printf("entries %.3f\nmade %ld\n", (double)count / (now() - start), made);
}

static void check(const char *dir, long count, long members)
{
	long found = 0;

	for (int i = 0; i < FOLDERS; i++) {
		const char *name = path("%s/%d", dir, i);
		DIR *listed = opendir(name);
		struct dirent *entry;

		if (!listed)
			fail("can't list", name);
		while ((entry = readdir(listed)))
			found += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") && strcmp(entry->d_name, "lock");
		closedir(listed);
	}
	if (found != count) {
		fprintf(stderr, "cache: %ld files for %ld entries\n", found, count);
		exit(1);
	}
	for (long i = 0; i < count; i++) {
		read_entry(path("%s/%ld/%ld", dir, i % FOLDERS, i), i);
		for (long member = 0; member < members; member++)
			read_entry(path("%s/of-%ld/%ld", dir, member, i), i);
	}
}

int main(int argc, char **argv)
{
	long count = argc == 5 ? strtol(argv[3], NULL, 10) : 0;

	umask(0);
	if (count > 0 && !strcmp(argv[1], "use"))
		use(argv[2], count, argv[4]);
	else if (count > 0 && !strcmp(argv[1], "check"))
		check(argv[2], count, strtol(argv[4], NULL, 10));
	else
		return fprintf(stderr, "usage: cache use DIR COUNT MEMBER | cache check DIR COUNT MEMBERS\n"), 2;
	return 0;
}
