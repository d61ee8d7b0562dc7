// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs look for the driver under this name.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
