// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of the guests: who owns a device, and who uses it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Where Debian has libraries.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("accel-owner");
        std::fs::create_dir_all(path.join("vendors")).unwrap();
        path
    })
}

fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The kit's guest of this kernel with these items of `guest/add`.
fn image(name: &str, kernel: &str, items: &[String]) -> PathBuf {
    let places = tombolo_vm::guest::kit::places(Path::new(env!("CARGO_MANIFEST_DIR")));
    let kit = tombolo_vm::guest::kit::kit(&places, Some(kernel)).expect("the guest kit");
    let image = folder().join(name);
    let mut add = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../guest/add"));
    add.arg("--base").arg(kit.initrd.unwrap()).arg("-o").arg(&image).args(items);
    done(&mut add);
    image
}

fn there(path: &str) -> String {
    format!("{path}:{path}")
}

fn stripped(program: &Path, name: &str) -> String {
    let to = folder().join(name);
    done(Command::new("strip").arg("-o").args([&to, program]));
    to.display().to_string()
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
        let programs = Path::new(env!("CARGO_BIN_EXE_tombolo")).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "-q", "--locked", "-p", "tombolo-opencl", "--target-dir"]);
        build.arg(programs.parent().unwrap());
        if programs.ends_with("release") {
            build.arg("--release");
        }
        done(&mut build);
        let library = stripped(&programs.join("libtombolo_opencl.so"), "libtombolo-opencl.so");
        std::fs::write(folder().join("vendors/tombolo.icd"), "/usr/lib/libtombolo-opencl.so\n").unwrap();
        let mut items = vec![
            format!("{library}:/usr/lib/libtombolo-opencl.so"),
            format!("{}:/etc/OpenCL/vendors", folder().join("vendors").display()),
        ];
        for name in ["steady", "hold", "damage", "escape"] {
            let source = format!("{}/../accel/tests/{name}.c", env!("CARGO_MANIFEST_DIR"));
            let program = folder().join(name);
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-Wno-deprecated-declarations", &source, "-o"]).arg(&program).arg("-lOpenCL");
            done(&mut cc);
            items.push(program.display().to_string());
        }
        image("client.img", "6.1", &items)
    })
}
