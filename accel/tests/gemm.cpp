// SPDX-License-Identifier: Apache-2.0 OR MIT
// ViennaCL: a product of matrices and a system solved by conjugate gradients, checked on the CPU; prints what must be the same each time.
#define CL_TARGET_OPENCL_VERSION 120
#define VIENNACL_WITH_OPENCL
#include <cmath>
#include <cstdio>
#include <map>
#include <vector>
#include "viennacl/compressed_matrix.hpp"
#include "viennacl/linalg/cg.hpp"
#include "viennacl/linalg/prod.hpp"
#include "viennacl/matrix.hpp"
#include "viennacl/vector.hpp"

static bool gemm()
{
	const size_t n = 128; // no padding on the device
	std::vector<float> a(n * n), b(n * n), c(n * n);
	for (size_t i = 0; i < n * n; i++) {
		a[i] = float(i % 13) - 6;
		b[i] = float(i % 7) - 3;
	}
	viennacl::matrix<float> da(n, n), db(n, n), dc(n, n);
	viennacl::fast_copy(&a[0], &a[0] + n * n, da);
	viennacl::fast_copy(&b[0], &b[0] + n * n, db);
	dc = viennacl::linalg::prod(da, db);
	viennacl::fast_copy(dc, &c[0]);
	for (size_t i = 0; i < n; i++)
		for (size_t j = 0; j < n; j++) {
			float sum = 0;
			for (size_t k = 0; k < n; k++)
				sum += a[i * n + k] * b[k * n + j];
			if (sum != c[i * n + j])
				return false;
		}
	return true;
}

static unsigned cg(double &residual)
{
	const unsigned n = 1000;
	std::vector<std::map<unsigned, float>> a(n);
	for (unsigned i = 0; i < n; i++) {
		a[i][i] = 4;
		if (i > 0)
			a[i][i - 1] = -1;
		if (i + 1 < n)
			a[i][i + 1] = -1;
	}
	viennacl::compressed_matrix<float> da(n, n);
	viennacl::copy(a, da);
	viennacl::vector<float> rhs = viennacl::scalar_vector<float>(n, 1.0f);
	viennacl::linalg::cg_tag tag(1e-6, 200);
	viennacl::vector<float> x = viennacl::linalg::solve(da, rhs, tag);
	viennacl::vector<float> r = viennacl::linalg::prod(da, x);
	r -= rhs;
	residual = viennacl::linalg::norm_2(r) / std::sqrt(double(n));
	return tag.iters();
}

int main()
{
	double residual;
	printf("gemm: %s\n", gemm() ? "right" : "wrong");
	unsigned iterations = cg(residual);
	printf("cg: %u iterations, %s\n", iterations, residual < 1e-5 ? "solved" : "not solved");
	return 0;
}
