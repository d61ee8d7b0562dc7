// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CUDA of a compose file: programs that NVIDIA's nvcc compiled, in a real guest, on the test device (accel/tests/cuda-device) as the host's
//! driver. Under TCG, with the guest kit's 6.1 kernel.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use common::Lab;
use opencl::{built, done, folder, image, stripped};

mod common;
#[allow(dead_code)] // What OpenCL alone needs.
#[path = "common/opencl.rs"]
mod opencl;

const PROGRAMS: [&str; 2] = ["vector_add", "reduce"];

/// A command whose CUDA driver is the test device: a copy, as a confined worker sees the folder and not where a link leads.
fn on_the_device(mut command: Command) -> Command {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        let driver = folder().join("driver");
        std::fs::create_dir_all(&driver).unwrap();
        std::fs::copy(built().join("libtombolo_cuda_device.so"), driver.join("libcuda.so.1")).unwrap();
        driver
    });
    command.env("LD_LIBRARY_PATH", driver);
    command
}

/// A program of accel/tests/cuda, with NVIDIA's runtime in it.
fn compiled(name: &str) -> PathBuf {
    let tests = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../accel/tests"));
    let toolkit = done(Command::new(tests.join("cuda-toolkit")).arg("nvcc")).stdout;
    let toolkit = PathBuf::from(String::from_utf8(toolkit).unwrap().trim());
    let program = folder().join(name);
    let mut nvcc = Command::new(toolkit.join("bin/nvcc"));
    nvcc.args(["-std=c++17", "-cudart", "static", "-arch=compute_80", "-code=compute_80", "-L"]);
    nvcc.arg(toolkit.join("lib")).arg(tests.join("cuda").join(name).with_extension("cu"));
    done(nvcc.arg("-o").arg(&program));
    program
}

fn text(mut command: Command) -> String {
    String::from_utf8(done(&mut command).stdout).unwrap()
}

const ONE: &str = "[accel.gpu]\napi = \"cuda\"\nwindow = \"64M\"\nchannels = 2\n\
                   [vm.a]\nkernel = \"6.1\"\nmemory = \"512M\"\naccelerators = [\"gpu\"]\n";

#[test]
fn programs_of_nvcc_print_in_a_vm_what_they_print_on_the_hosts_device() {
    let programs = PROGRAMS.map(compiled);
    let library = stripped(&built().join("libtombolo_cuda.so"), "libcuda.so.1");
    let mut items = programs.each_ref().map(|program| program.display().to_string()).to_vec();
    items.push(format!("{library}:/usr/lib/libcuda.so.1"));
    let initrd = image("initrd.img", "6.1", &items);
    let lab = Lab::new(&format!("{ONE}initrd = \"{}\"\n", initrd.display()));
    let devices = on_the_device(lab.command(&["accel", "devices", "--api", "cuda"]));
    assert_eq!(text(devices), "CUDA: Tombolo test device (CPU)\n");

    let up = done(&mut on_the_device(lab.command(&["up"])));
    let err = String::from_utf8_lossy(&up.stderr);
    assert!(!err.contains("libcuda"), "{err}");
    assert_eq!(lab.ps()["accelerators"][0]["api"], "cuda");
    let doctor = lab.run(&["doctor", "a"]);
    assert!(String::from_utf8_lossy(&doctor.stdout).contains("/lib/libcuda.so.1"), "{doctor:?}");
    for (name, program) in PROGRAMS.iter().zip(&programs) {
        let expected = text(on_the_device(Command::new(program)));
        assert_eq!(lab.good(&["exec", "a", "--", name]), expected, "{name}");
    }
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn a_host_without_cuda_is_told_before_anything_boots() {
    let lab = Lab::new(ONE);
    let output = lab.command(&["up"]).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && err.contains("accel.gpu: no CUDA device on this machine"), "{err}");
    assert!(err.contains("NVIDIA's driver") && !err.contains("a: starting"), "{err}");
    lab.assert_nothing_left();
}
