// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QEMU's command line for a guest of a test.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use tombolo_qemu::hypervisor::Hypervisor;
use tombolo_qemu::version::Qemu;

/// Set to `kvm`, it makes guests run under KVM; they run under TCG otherwise, which works on every host.
pub const HYPERVISOR: &str = "TOMBOLO_TEST_HYPERVISOR";
/// MiB of address space that a guest's memory, zones and later devices share. It costs address space only.
const ROOM: u64 = 64 << 10;
/// The kernel takes the pauses of a guest on a busy host for hangs of its own; a guest that really hangs shows by its silence.
const NO_WATCHDOGS: &str = "nowatchdog rcupdate.rcu_cpu_stall_suppress=1";

/// A guest to start. Its second serial port is QEMU's standard input and output.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The kernel's image.
    pub kernel: PathBuf,
    /// The initramfs that [`crate::image::Image`] wrote.
    pub image: PathBuf,
    /// The file that gets the kernel's messages.
    pub console: PathBuf,
    /// MiB.
    pub memory: u64,
    /// Other processes may map the guest's memory (vhost-user); such memory is left out when the guest's state is saved.
    pub shared_memory: bool,
    /// CPUs that are online.
    pub processors: u32,
    /// A file that the guest sees as persistent memory, and its size in bytes.
    pub zone: Option<(PathBuf, u64)>,
    /// Arguments for CPUs, memory and NUMA nodes, in place of `memory` and `processors`.
    pub layout: Option<Vec<OsString>>,
    /// More arguments for the kernel.
    pub kernel_arguments: String,
    /// More arguments for QEMU.
    pub arguments: Vec<OsString>,
}

impl Machine {
    /// A guest with two CPUs and 256 MiB.
    #[must_use]
    pub fn new(kernel: &Path, image: &Path, console: &Path) -> Self {
        Self {
            kernel: kernel.to_owned(),
            image: image.to_owned(),
            console: console.to_owned(),
            memory: 256,
            shared_memory: false,
            processors: 2,
            zone: None,
            layout: None,
            kernel_arguments: String::new(),
            arguments: Vec::new(),
        }
    }

    /// The command that starts it, with the installed QEMU or that of `$TOMBOLO_QEMU`.
    ///
    /// # Errors
    /// There is no usable QEMU.
    pub fn command(&self) -> Result<Command> {
        let kvm = std::env::var_os(HYPERVISOR).is_some_and(|value| value == "kvm");
        let hypervisor = if kvm { Hypervisor::Kvm } else { Hypervisor::Tcg };
        let qemu = Qemu::find(None)?;
        let mut command = Command::new(&qemu.program);
        command.args(self.options(hypervisor, &qemu));
        Ok(command)
    }

    fn options(&self, hypervisor: Hypervisor, qemu: &Qemu) -> Vec<OsString> {
        let mut options: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| options.extend(words.iter().map(OsString::from));
        add(&["-machine", "q35", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        add(&hypervisor.arguments(qemu));
        options.extend(self.layout.clone().unwrap_or_else(|| self.one_node(hypervisor)));
        let mut add = |words: &[&str]| options.extend(words.iter().map(OsString::from));
        add(&["-serial", &format!("file:{}", escaped(&self.console)), "-serial", "stdio"]);
        if let Some((path, size)) = &self.zone {
            let path = escaped(path);
            add(&["-object", &format!("memory-backend-file,id=zone,mem-path={path},size={size},share=on")]);
            add(&["-device", "virtio-pmem-pci,memdev=zone"]);
        }
        add(&["-append", &self.kernel_line(hypervisor, qemu)]);
        options.extend(["-kernel".into(), self.kernel.clone().into()]);
        options.extend(["-initrd".into(), self.image.clone().into()]);
        options.extend(self.arguments.iter().cloned());
        options
    }

    /// CPUs and memory of a guest without NUMA nodes.
    fn one_node(&self, hypervisor: Hypervisor) -> Vec<OsString> {
        // QEMU's first RAM block: where a smaller one is first, QEMU 10.0 takes offsets in a block for offsets in all RAM when it saves a
        // guest, and ends by an assertion (tlb_reset_dirty_range_all).
        let memory = self.memory;
        let backend = if self.shared_memory { "memfd" } else { "ram" };
        let share = if self.shared_memory { "on" } else { "off" };
        [
            "-machine",
            "memory-backend=ram",
            "-smp",
            &hypervisor.processors(self.processors),
            "-object",
            &format!("memory-backend-{backend},id=ram,size={memory}M,share={share}"),
            "-m",
            &format!("{memory}M,maxmem={}M", memory + ROOM),
        ]
        .map(OsString::from)
        .into()
    }

    fn kernel_line(&self, hypervisor: Hypervisor, qemu: &Qemu) -> String {
        // A layout may have any number of CPUs.
        let cpus = if self.layout.is_some() { u32::MAX } else { self.processors };
        let own = hypervisor.kernel_arguments(qemu, cpus);
        format!("console=ttyS0 quiet panic=-1{own} {NO_WATCHDOGS} {}", self.kernel_arguments)
    }
}

/// A path in an option of QEMU's, where a comma ends the value.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_gets_its_zone_its_console_and_the_cpu_that_the_product_uses() {
        let mut machine = Machine::new(Path::new("/k"), Path::new("/i"), Path::new("/log,1"));
        machine.zone = Some(("/dev/shm/z".into(), 4096));
        machine.processors = 1;
        machine.arguments.push("-S".into());
        let qemu = Qemu { program: "qemu".into(), version: (7, 2, 22) };
        let options = machine.options(Hypervisor::Tcg, &qemu);
        let line: Vec<String> = options.into_iter().map(|word| word.into_string().unwrap()).collect();
        let line = line.join(" ");
        for part in [
            "-cpu max,-erms,-fsrm,-cx16 -machine memory-backend=ram -smp 1,maxcpus=2 ",
            "memory-backend-ram,id=ram,size=256M,share=off -m 256M,maxmem=65792M",
            "-serial file:/log,,1 -serial stdio",
            "memory-backend-file,id=zone,mem-path=/dev/shm/z,size=4096,share=on -device virtio-pmem-pci,memdev=zone",
            "-kernel /k -initrd /i -S",
        ] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
        machine.layout = Some(vec!["-m".into(), "1G".into()]);
        let own = format!("{:?}", machine.options(Hypervisor::Tcg, &qemu));
        assert!(own.contains("\"-m\", \"1G\"") && !own.contains("id=ram") && !own.contains("-smp"), "{own}");
        machine.layout = None;
        machine.shared_memory = true;
        assert!(
            format!("{:?}", machine.options(Hypervisor::Kvm, &qemu)).contains("memory-backend-memfd,id=ram")
        );
    }
}
