// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * What ranks of one machine can do together: messages of many sizes, collectives, a shared window, one-sided access,
 * and a file that all write. Each rank prints one line, and fails if anything is not as it should be. The argument is the file.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, ranks;

static void must(int good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "rank %d: %s\n", rank, what);
	MPI_Abort(MPI_COMM_WORLD, 3);
}

static void messages(void)
{
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;

	for (int size = 1; size <= 4 << 20; size *= 8) {
		unsigned char *out = malloc(size), *in = malloc(size);

		memset(out, rank + 1, size);
		MPI_Sendrecv(out, size, MPI_BYTE, next, size, in, size, MPI_BYTE, last, size, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		for (int i = 0; i < size; i++)
			must(in[i] == last + 1, "a message has other bytes");
		free(out);
		free(in);
	}
}

static void collectives(void)
{
	int sum = rank, *all = malloc(ranks * sizeof(int)), *mine = malloc(ranks * sizeof(int));

	MPI_Allreduce(MPI_IN_PLACE, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	must(sum == ranks * (ranks - 1) / 2, "a sum is wrong");
	for (int i = 0; i < ranks; i++)
		mine[i] = rank * 100 + i;
	MPI_Alltoall(mine, 1, MPI_INT, all, 1, MPI_INT, MPI_COMM_WORLD);
	for (int i = 0; i < ranks; i++)
		must(all[i] == i * 100 + rank, "an alltoall is wrong");
	free(all);
	free(mine);
}

/* Returns how many ranks share memory. */
static int windows(void)
{
	MPI_Comm node;
	MPI_Win win;
	int sharing, on_node, *own, *of, disp, shown[4], got[4] = { 0 };
	MPI_Aint size;

	MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
	MPI_Comm_size(node, &sharing);
	MPI_Comm_rank(node, &on_node);
	MPI_Win_allocate_shared(sizeof(int), sizeof(int), MPI_INFO_NULL, node, &own, &win);
	MPI_Win_lock_all(0, win);
	*own = 1000 + on_node;
	MPI_Win_sync(win);
	MPI_Barrier(node);
	MPI_Win_sync(win);
	for (int i = 0; i < sharing; i++) {
		MPI_Win_shared_query(win, i, &size, &disp, &of);
		must(*of == 1000 + i, "a shared window has other bytes");
	}
	MPI_Win_unlock_all(win);
	MPI_Win_free(&win);
	for (int i = 0; i < 4; i++)
		shown[i] = rank * 10 + i;
	MPI_Win_create(shown, sizeof(shown), sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &win);
	MPI_Win_fence(0, win);
	MPI_Get(got, 4, MPI_INT, (rank + 1) % ranks, 0, 4, MPI_INT, win);
	MPI_Win_fence(0, win);
	for (int i = 0; i < 4; i++)
		must(got[i] == (rank + 1) % ranks * 10 + i, "a one-sided read has other bytes");
	MPI_Win_free(&win);
	MPI_Comm_free(&node);
	return sharing;
}

static void file(char *path)
{
	MPI_File f;
	int own = rank * 7, seen;

	must(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &f) == MPI_SUCCESS, "a file can't be opened");
	MPI_File_set_atomicity(f, 1);
	MPI_File_write_at_all(f, rank * sizeof(int), &own, 1, MPI_INT, MPI_STATUS_IGNORE);
	MPI_File_sync(f);
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_File_read_at(f, ((rank + 1) % ranks) * sizeof(int), &seen, 1, MPI_INT, MPI_STATUS_IGNORE);
	must(seen == (rank + 1) % ranks * 7, "a file has other bytes");
	MPI_File_write_shared(f, &own, 1, MPI_INT, MPI_STATUS_IGNORE);
	MPI_File_close(&f);
}

int main(int argc, char **argv)
{
	char name[MPI_MAX_PROCESSOR_NAME];
	int length, sharing;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	MPI_Get_processor_name(name, &length);
	messages();
	collectives();
	sharing = windows();
	if (argc > 1)
		file(argv[1]);
	printf("rank %d of %d on %s shares with %d\n", rank, ranks, name, sharing);
	MPI_Finalize();
	return 0;
}
