// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CUDA of a compose file: programs that NVIDIA's nvcc compiled, and tinygrad, in a real guest, on the test device (accel/tests/cuda-device) as the host's
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

fn tests() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../accel/tests"))
}

/// A folder of packages from PyPI.
fn packages(what: &str) -> PathBuf {
    let folder = done(Command::new(tests().join("cuda-toolkit")).arg(what)).stdout;
    PathBuf::from(String::from_utf8(folder).unwrap().trim())
}

/// A program of accel/tests/cuda, with NVIDIA's runtime in it.
fn compiled(name: &str) -> PathBuf {
    let (tests, toolkit) = (tests(), packages("nvcc"));
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

/// tinygrad's training of digits, in words of `env`.
fn training(tinygrad: &Path) -> Vec<String> {
    let folder = tinygrad.display();
    let places = format!("PYTHONPATH={folder} TOMBOLO_DIGITS={folder} HOME=/tmp");
    // Compiled in this process, so that it is known what that loads; its cache on disk needs a database, which guests don't have.
    let settings = "DEV=CUDA:PTX PARALLEL=0 CACHELEVEL=0";
    places.split(' ').chain(settings.split(' ')).map(str::to_owned).collect()
}

/// Trains a net for so many steps on the host's device and in a VM, to so many percent of unseen digits: each loss and the share are the same to the last digit.
fn tinygrad_trains(net: &str, steps: &str, least: &str) {
    let (tinygrad, program) = (packages("tinygrad"), tests().join("cuda/tinygrad_digits.py"));
    let words = [net, steps, least];
    let list = folder().join(format!("{net}.list"));
    let mut direct = on_the_device(Command::new("env"));
    direct.args(training(&tinygrad)).arg("/usr/bin/python3").arg(tests().join("cuda/loaded.py"));
    let expected = text({
        direct.arg(&list).arg(&program).args(words);
        direct
    });
    assert!(expected.ends_with("\nok\n"), "{expected}");

    let library = stripped(&built().join("libtombolo_cuda.so"), "libcuda.so.1");
    let mut items = vec!["/usr/bin/python3".to_owned(), format!("{library}:/usr/lib/libcuda.so.1")];
    items.extend([program, tinygrad.join("digits.csv.gz")].map(|file| format!("{0}:{0}", file.display())));
    for file in std::fs::read_to_string(&list).unwrap().lines() {
        items.push(format!("{file}:{file}"));
    }
    let initrd = image(&format!("{net}.img"), "6.1", &items);
    let lab = Lab::new(&format!("{ONE}initrd = \"{}\"\n", initrd.display()));
    done(&mut on_the_device(lab.command(&["up"])));
    let program = tests().join("cuda/tinygrad_digits.py").display().to_string();
    let settings = training(&tinygrad);
    let mut exec = vec!["exec", "a", "--", "env"];
    exec.extend(settings.iter().map(String::as_str));
    exec.extend(["/usr/bin/python3", &program]);
    exec.extend(words);
    assert_eq!(lab.good(&exec), expected);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn tinygrad_trains_a_layer_in_a_vm_as_on_the_hosts_device() {
    tinygrad_trains("small", "10", "30");
}

/// Part of the suite cuda-up-long.
#[test]
fn whole_tinygrad_trains_a_convolutional_net_to_95_percent_in_a_vm() {
    tinygrad_trains("lenet", "300", "95");
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
