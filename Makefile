# SPDX-License-Identifier: Apache-2.0 OR MIT
# Thin: each target says what it needs, and scripts do it.

.PHONY: guest
guest: ## build the guest kernels and images
	@guest/build
