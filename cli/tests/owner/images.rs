// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of the guests: who owns a device, and who uses it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::opencl::{client_library, done, image, program, stripped};

/// Debian's folder for libraries.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

fn there(path: &str) -> String {
    format!("{path}:{path}")
}

/// A guest that can serve, but has no device.
pub fn bare() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let tombolo = stripped(Path::new(env!("CARGO_BIN_EXE_tombolo")), "tombolo");
        image("bare.img", "6.1", &[tombolo, format!("{LIBRARIES}/libOpenCL.so.1")])
    })
}

/// A guest that can serve, and computes by PoCL: the driver, its headers and built-in functions, and the linker that it calls.
pub fn owner(kernel: &str) -> PathBuf {
    static ITEMS: OnceLock<Vec<String>> = OnceLock::new();
    let items = ITEMS.get_or_init(|| {
        let icd =
            std::fs::read_to_string("/etc/OpenCL/vendors/pocl.icd").expect("pocl-opencl-icd is installed");
        let gcc = done(Command::new("cc").arg("-print-file-name=libgcc.a")).stdout;
        let gcc = PathBuf::from(String::from_utf8(gcc).unwrap().trim());
        let mut items = vec![
            stripped(Path::new(env!("CARGO_BIN_EXE_tombolo")), "tombolo"),
            "ld".into(),
            format!("{LIBRARIES}/{}", icd.trim()),
            format!("{LIBRARIES}/libOpenCL.so.1"),
            format!("{LIBRARIES}/libgcc_s.so.1"),
            format!("{LIBRARIES}/libmvec.so.1"),
            there("/etc/OpenCL/vendors/pocl.icd"),
            there(&format!("{LIBRARIES}/pocl")),
            there("/usr/share/pocl/include"),
            there(gcc.to_str().unwrap()),
            there(gcc.with_file_name("libgcc_s.so").to_str().unwrap()),
            // By which the compiler finds the folder.
            there(gcc.with_file_name("crtbegin.o").to_str().unwrap()),
        ];
        items.extend(["libc.so", "libc_nonshared.a", "libm.so"].map(|l| there(&format!("{LIBRARIES}/{l}"))));
        // For processors without AVX, which QEMU 7.2 emulates wrongly.
        let built_in = std::fs::read_dir("/usr/share/pocl").unwrap().map(|entry| entry.unwrap().path());
        let built_in = built_in.map(|path| path.display().to_string());
        items.extend(built_in.filter(|p| p.ends_with(".bc") && !p.contains("avx")).map(|p| there(&p)));
        items
    });
    image(&format!("owner-{kernel}.img"), kernel, items)
}

/// A guest with the client library, and programs that compute.
pub fn client() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let mut items = client_library().to_vec();
        items.extend(["steady", "hold", "damage", "escape"].map(|name| program(name).display().to_string()));
        image("client.img", "6.1", &items)
    })
}
