// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Latency, bandwidth and a collective, as OSU's micro-benchmarks measure them: the last rank answers the first.
 * Rank 0 prints a line for each: the case, the value, the unit. The argument is the time for each case in seconds.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LARGE (1 << 20)
#define WINDOW 8

static int rank, ranks;
static char *buffer;

static double seconds_of(int turns, int size)
{
	int peer = rank == 0 ? ranks - 1 : 0;
	double begun;

	MPI_Barrier(MPI_COMM_WORLD);
	begun = MPI_Wtime();
	for (int i = 0; i < turns && (rank == 0 || rank == ranks - 1); i++) {
		if (rank == 0) {
			MPI_Send(buffer, size, MPI_CHAR, peer, 1, MPI_COMM_WORLD);
			MPI_Recv(buffer, size, MPI_CHAR, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(buffer, size, MPI_CHAR, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(buffer, size, MPI_CHAR, peer, 1, MPI_COMM_WORLD);
		}
	}
	return MPI_Wtime() - begun;
}

static double stream(int turns, int size)
{
	MPI_Request requests[WINDOW];
	int peer = rank == 0 ? ranks - 1 : 0;
	char word = 0;
	double begun;

	MPI_Barrier(MPI_COMM_WORLD);
	begun = MPI_Wtime();
	for (int i = 0; i < turns && (rank == 0 || rank == ranks - 1); i++) {
		for (int w = 0; w < WINDOW; w++) {
			if (rank == 0)
				MPI_Isend(buffer + (size_t)w * size, size, MPI_CHAR, peer, 2, MPI_COMM_WORLD, &requests[w]);
			else
				MPI_Irecv(buffer + (size_t)w * size, size, MPI_CHAR, peer, 2, MPI_COMM_WORLD, &requests[w]);
		}
		MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
		if (rank == 0)
			MPI_Recv(&word, 1, MPI_CHAR, peer, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		else
			MPI_Send(&word, 1, MPI_CHAR, peer, 3, MPI_COMM_WORLD);
	}
	return MPI_Wtime() - begun;
}

static double reduce(int turns, int size)
{
	double in = rank, out, begun;

	(void)size;
	MPI_Barrier(MPI_COMM_WORLD);
	begun = MPI_Wtime();
	for (int i = 0; i < turns; i++)
		MPI_Allreduce(&in, &out, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	return MPI_Wtime() - begun;
}

/* Turns that take about so long, found out by doubling; all ranks do the same. Returns the seconds of one. */
static double each(double (*run)(int, int), int size, double seconds)
{
	int turns = 4;
	double taken;

	for (;;) {
		taken = run(turns, size);
		MPI_Bcast(&taken, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
		if (taken >= seconds)
			return taken / turns;
		turns *= taken < seconds / 8 ? 4 : 2;
	}
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 1, latency, bandwidth, collective;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	buffer = malloc((size_t)WINDOW * LARGE);
	memset(buffer, 1, (size_t)WINDOW * LARGE);
	latency = each(seconds_of, 8, seconds) / 2;
	bandwidth = (double)WINDOW * LARGE / each(stream, LARGE, seconds);
	collective = each(reduce, 8, seconds);
	if (rank == 0)
		printf("mpi-lat-8 %.3f us\nmpi-bw-1M %.1f MB/s\nmpi-allreduce-8 %.3f us\n", latency * 1e6, bandwidth / 1e6, collective * 1e6);
	MPI_Finalize();
	return 0;
}
