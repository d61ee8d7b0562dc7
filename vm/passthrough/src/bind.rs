// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carries plans out and gives devices back.
//!
//! A record per device is written before the device is touched, and removed after it was given back, so at any instant the records name
//! at least the devices that are away. A record that is there says where its device came from, however far its writer got: it is
//! not written anew with what a half-done binding shows. A record may name an owner, a process; [`Store::orphans`] are records whose
//! owner has ended.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tombolo_brief::child::leave_sockets;

use crate::address::Address;
use crate::device::VFIO;
use crate::host::{Host, link_name, text};
use crate::lock;
use crate::plan::Plan;
use crate::usage::Use;

/// The VM that a device was bound for, and its process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// The VM's name.
    pub vm: String,
    /// The owner's process id.
    #[serde(default)]
    pub process: u32,
    /// When that process was started, in ticks since the host's boot: another one with its number is another owner.
    #[serde(default)]
    pub started: u64,
}

impl Owner {
    /// A living process as the owner of a VM's devices.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn new(vm: &str, process: u32) -> io::Result<Owner> {
        let started = start_of(process).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        Ok(Owner { vm: vm.to_owned(), process, started })
    }

    /// The same of a VM that has ended, while the process lives on.
    #[must_use]
    pub fn ended(self) -> Owner {
        Owner { process: NOBODY, started: 0, ..self }
    }

    /// Returns whether the process still runs.
    pub fn is_alive(&self) -> bool {
        start_of(self.process) == Some(self.started)
    }
}

/// When a process was started (proc(5), `/proc/PID/stat`, field 22); `None`: it is not there, or is dead and not yet waited for.
fn start_of(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field, the name, is in parentheses and may contain anything.
    let mut fields = stat.rsplit_once(") ")?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

/// The state to restore when a device is given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The PCI function that was bound to vfio-pci.
    pub address: Address,
    /// The driver it came from.
    pub driver: Option<String>,
    /// The override that was set before.
    pub driver_override: Option<String>,
    /// The VM that it was bound for; None: bound by hand, stays until released by hand.
    pub owner: Option<Owner>,
}

impl Record {
    fn is_orphan(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| !owner.is_alive())
    }
}

/// A failure of a binding that was allowed.
#[derive(Debug, Error)]
pub enum BindError {
    /// vfio-pci cannot be had.
    #[error("the kernel module vfio-pci cannot be loaded ({0}): install the kernel's full module package")]
    NoDriver(String),
    /// The kernel refused a step; everything was undone.
    #[error("binding {address} failed at {step}: {source}. Every device was given back; `dmesg` says more")]
    Step {
        /// The PCI function whose step failed.
        address: Address,
        /// The file that was written.
        step: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refused a step on a device's way back. Its record stays.
    #[error(
        "{address} is not given back: {step} says {source}; `dmesg` says more. The next `tombolo down`, `tombolo up` or `tombolo clean` tries again"
    )]
    Return {
        /// The PCI function whose step failed.
        address: Address,
        /// The file that was written.
        step: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A device that its own driver does not take back. Its record stays.
    #[error(
        "{address} is not given back: it has {found} instead of {wanted}; `dmesg` says why. The next `tombolo down`, `tombolo up` or `tombolo clean` resets it and tries again"
    )]
    NotTakenBack {
        /// The PCI function that was probed.
        address: Address,
        /// The driver that has it, or "no driver".
        found: String,
        /// The driver that it came from.
        wanted: String,
    },
    /// A probe that ended with another driver.
    #[error("{address} went to {found} instead of {wanted}; `dmesg` says why")]
    WrongDriver {
        /// The PCI function that was probed.
        address: Address,
        /// The driver that has it, or "no driver".
        found: String,
        /// The driver that should.
        wanted: String,
    },
    /// Not bound by this project.
    #[error("{0} was not bound by tombolo: only what `tombolo passthrough bind` or a VM took is given back")]
    NotOurs(Address),
    /// Another VM's, whose owner lives.
    #[error("{address} belongs to the VM {vm}, whose owner is process {process}: stop that VM first")]
    Taken {
        /// The PCI function that was asked for.
        address: Address,
        /// The VM's name.
        vm: String,
        /// The process that took it for the VM.
        process: u32,
    },
    /// Open in a VM; unbinding would wait for ever.
    #[error("{0} is open in a VM: stop the VM first")]
    Open(Address),
    /// A record that this program has not written.
    #[error(
        "the record {path} is damaged ({why}): see by 'lspci -k' that the device is where it belongs, then remove the record"
    )]
    Damaged {
        /// The path of the device's record.
        path: PathBuf,
        /// The parser's words.
        why: String,
    },
    /// The folder of records.
    #[error("the record {path} cannot be kept: {source}")]
    Record {
        /// The path of a device's record, or of the folder when its list could not be read.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl BindError {
    /// Returns whether another process is in the way, which ends by itself: a QEMU that is dying has the device open, or somebody has the lock of the
    /// device or its IOMMU group for a moment.
    fn passes(&self) -> bool {
        match self {
            BindError::Open(_) => true,
            BindError::Return { source, .. } => {
                matches!(source.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
            }
            _ => false,
        }
    }
}

/// The kernel's side of binding.
pub trait Bus {
    /// Makes vfio-pci available.
    fn load_vfio(&mut self) -> Result<(), BindError>;
    /// Writes to a sysfs file.
    fn write(&mut self, path: &Path, content: &str) -> io::Result<()>;
}

/// The running kernel.
#[derive(Debug, Default)]
pub struct Kernel;

impl Bus for Kernel {
    fn load_vfio(&mut self) -> Result<(), BindError> {
        if Path::new("/sys/bus/pci/drivers").join(VFIO).exists() {
            return Ok(());
        }
        let mut command = Command::new("modprobe");
        leave_sockets(command.arg(VFIO));
        let result = command.output().map_err(|e| BindError::NoDriver(e.to_string()))?;
        if result.status.success() {
            Ok(())
        } else {
            Err(BindError::NoDriver(String::from_utf8_lossy(&result.stderr).trim().to_owned()))
        }
    }

    fn write(&mut self, path: &Path, content: &str) -> io::Result<()> {
        fs::OpenOptions::new().write(true).open(path)?.write_all(content.as_bytes())
    }
}

/// The driver of a device that has none, in messages.
const NO_DRIVER: &str = "no driver";

/// Time for another process to bind a device or to give it back.
const HOLD: Duration = Duration::from_secs(60);

/// The pause between two looks whether those in the way have ended.
const PAUSE: Duration = Duration::from_millis(50);
/// The number of no process (proc(5)), for a VM that has ended while the owner of its devices lives.
const NOBODY: u32 = 0;

/// The folder of records.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// Records of this host, lost at its reboot as the bindings are.
    pub fn of_host() -> Self {
        Self::at("/run/tombolo/passthrough")
    }

    /// Records in `folder`.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns whether another user keeps the records, and has the devices.
    pub fn is_anothers(&self) -> bool {
        match fs::metadata(&self.folder) {
            Ok(folder) => folder.uid() != rustix::process::geteuid().as_raw(),
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        }
    }

    fn path(&self, address: Address) -> PathBuf {
        self.folder.join(format!("{address}.json"))
    }

    /// The record of a device that is away.
    pub fn get(&self, address: Address) -> Result<Option<Record>, BindError> {
        let path = self.path(address);
        match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|e| BindError::Damaged { path, why: e.to_string() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(BindError::Record { path, source }),
        }
    }

    /// The devices that have a record.
    fn addresses(&self) -> Result<Vec<Address>, BindError> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(BindError::Record { path: self.folder.clone(), source }),
        };
        let mut addresses: Vec<Address> = entries
            .filter_map(|e| e.ok()?.file_name().to_str()?.strip_suffix(".json")?.parse().ok())
            .collect();
        addresses.sort();
        Ok(addresses)
    }

    /// Every record.
    pub fn all(&self) -> Result<Vec<Record>, BindError> {
        self.addresses()?.into_iter().filter_map(|address| self.get(address).transpose()).collect()
    }

    /// Records whose owner has died, and why others can't be read.
    pub fn orphans(&self) -> Result<(Vec<Record>, Vec<BindError>), BindError> {
        let (mut orphans, mut failures) = (Vec::new(), Vec::new());
        for address in self.addresses()? {
            match self.get(address) {
                Ok(record) => orphans.extend(record.filter(Record::is_orphan)),
                Err(error) => failures.push(error),
            }
        }
        Ok((orphans, failures))
    }

    fn put(&self, record: &Record) -> Result<(), BindError> {
        let path = self.path(record.address);
        let write = || {
            fs::create_dir_all(&self.folder)?;
            let new = path.with_extension("new");
            let mut file = File::create(&new)?;
            file.write_all(&serde_json::to_vec_pretty(record)?)?;
            file.sync_all()?;
            fs::rename(&new, &path)
        };
        write().map_err(|source| BindError::Record { path: path.clone(), source })
    }

    /// Keeps other processes from binding this device or giving it back, until the file is dropped.
    fn hold(&self, address: Address) -> Result<File, BindError> {
        let path = self.folder.join(format!("{address}.lock"));
        let hold = || {
            fs::create_dir_all(&self.folder)?;
            // Other users could lock what they can open.
            let file = File::options().create(true).append(true).mode(0o600).open(&path)?;
            lock::take(&file, &path, HOLD)?;
            io::Result::Ok(file)
        };
        hold().map_err(|source| BindError::Record { path: path.clone(), source })
    }

    /// Refuses a device that a living process has taken for another VM.
    fn refuse_anothers(&self, address: Address, owner: Option<&Owner>) -> Result<(), BindError> {
        match self.get(address)?.and_then(|record| record.owner) {
            Some(other) if Some(&other) != owner && other.is_alive() => {
                Err(BindError::Taken { address, vm: other.vm, process: other.process })
            }
            _ => Ok(()),
        }
    }

    fn remove(&self, address: Address) -> Result<(), BindError> {
        let path = self.path(address);
        fs::remove_file(&path).map_err(|source| BindError::Record { path, source })
    }
}

/// Binds every device of the plan to vfio-pci, or none. Of two VMs that want a device at the same time, one gets it. Returns the devices that are to be given
/// back when the owner has done with them: not those that were bound by hand before.
pub fn bind(
    host: &Host,
    bus: &mut dyn Bus,
    store: &Store,
    plan: &Plan,
    owner: Option<&Owner>,
) -> Result<Vec<Address>, BindError> {
    bus.load_vfio()?;
    // In the order of the addresses, so that no two processes wait for each other.
    let mut all: Vec<Address> =
        plan.take.iter().map(|(address, _)| *address).chain(plan.ready.clone()).collect();
    all.sort();
    let mut held = Vec::new();
    for address in &all {
        held.push(store.hold(*address)?);
        store.refuse_anothers(*address, owner)?;
    }
    for (index, (address, driver)) in plan.take.iter().enumerate() {
        let fresh = Record {
            address: *address,
            driver: driver.clone(),
            driver_override: override_of(host, *address),
            owner: owner.cloned(),
        };
        // A process that was killed while it bound or gave back has left the device without its driver, or with the override.
        let half_done = |d: &Option<String>| d.as_deref().is_none_or(|driver| driver == VFIO);
        let record = match store.get(*address)? {
            Some(known) if half_done(driver) || fresh.driver_override.as_deref() == Some(VFIO) => {
                Record { owner: owner.cloned(), ..known }
            }
            _ => fresh,
        };
        let result = store.put(&record).and_then(|()| take(host, bus, *address));
        if let Err(error) = result {
            for (undo, _) in plan.take[..=index].iter().rev() {
                // The first error is the one to tell; the record stays where giving back failed too.
                let _ = release_held(host, bus, store, *undo);
            }
            return Err(error);
        }
    }
    let mut taken: Vec<Address> = plan.take.iter().map(|(address, _)| *address).collect();
    for address in &plan.ready {
        // A VM that has ended could not give it back.
        if let Some(known @ Record { owner: Some(_), .. }) = store.get(*address)? {
            store.put(&Record { owner: owner.cloned(), ..known })?;
            taken.push(*address);
        }
    }
    Ok(taken)
}

/// Gives a device back to the driver it came from.
pub fn release(host: &Host, bus: &mut dyn Bus, store: &Store, address: Address) -> Result<(), BindError> {
    release_if(host, bus, store, address, |_| true)
}

/// As [`release`], if the device's record is such a one when no other process can change it any more.
fn release_if(
    host: &Host,
    bus: &mut dyn Bus,
    store: &Store,
    address: Address,
    is_wanted: impl Fn(&Record) -> bool,
) -> Result<(), BindError> {
    if store.get(address)?.is_none() {
        return Err(BindError::NotOurs(address));
    }
    let _held = store.hold(address)?;
    match store.get(address)? {
        Some(record) if is_wanted(&record) => release_held(host, bus, store, address),
        _ => Err(BindError::NotOurs(address)),
    }
}

fn release_held(host: &Host, bus: &mut dyn Bus, store: &Store, address: Address) -> Result<(), BindError> {
    let record = store.get(address)?.ok_or(BindError::NotOurs(address))?;
    let folder = host.device_folder(address);
    if !folder.exists() {
        // Unplugged meanwhile: there is nothing to give back.
        return store.remove(address);
    }
    let failed =
        |step: &Path, source| BindError::Return { address, step: step.display().to_string(), source };
    if open_in_vm(host, address).map_err(|e| failed(&folder, e))? {
        return Err(BindError::Open(address));
    }
    let mut step =
        |path: PathBuf, content: &str| bus.write(&path, content).map_err(|source| failed(&path, source));
    // An empty line clears the override (Linux drivers/base/driver.c, driver_set_override).
    let before = record.driver_override.as_deref().unwrap_or("");
    step(folder.join("driver_override"), &format!("{before}\n"))?;
    if driver_of(host, address).as_deref() == Some(VFIO) {
        step(folder.join("driver/unbind"), &address.to_string())?;
    }
    // VFIO only tries to reset a device that is closed. Whoever holds the device's lock then, as a reader of `driver_override` does, keeps the guest's
    // requests in it, and the next driver would let it go on with them.
    if driver_of(host, address).is_none() && folder.join("reset").exists() {
        step(folder.join("reset"), "1")?;
    }
    if let Some(wanted) = record.driver {
        step(host.root().join("sys/bus/pci/drivers_probe"), &address.to_string())?;
        let found = driver_of(host, address);
        if found.as_ref() != Some(&wanted) {
            let found = found.unwrap_or_else(|| NO_DRIVER.into());
            return Err(BindError::NotTakenBack { address, found, wanted });
        }
    }
    store.remove(address)
}

/// Time for a VM that was killed together with its owner to let go of its memory, and then of its devices.
const LETTING_GO: Duration = Duration::from_secs(30);

/// Gives a device back whose VM has ended, after those that are still in the way. One that can't be given back is an orphan from then on: the next
/// [`reclaim`] tries again.
///
/// # Errors
/// They are in the way for longer than [`LETTING_GO`], or the kernel refuses a step.
pub fn give_back(host: &Host, bus: &mut dyn Bus, store: &Store, address: Address) -> Result<(), BindError> {
    let given = patiently(LETTING_GO, || release(host, bus, store, address));
    if given.is_err() {
        disown(store, address)?;
    }
    given
}

/// Notes that the owner of a device has ended. The owner's process may live on, as a supervisor does whose VM has died.
fn disown(store: &Store, address: Address) -> Result<(), BindError> {
    let _held = store.hold(address)?;
    match store.get(address)? {
        Some(Record { owner: Some(owner), address, driver, driver_override }) => {
            store.put(&Record { owner: Some(owner.ended()), address, driver, driver_override })
        }
        _ => Ok(()),
    }
}

/// Tries again for `limit` while others are in the way.
fn patiently(limit: Duration, mut release: impl FnMut() -> Result<(), BindError>) -> Result<(), BindError> {
    let begun = Instant::now();
    loop {
        match release() {
            // Only the device itself tells that it was let go of.
            Err(e) if e.passes() && begun.elapsed() < limit => sleep(PAUSE),
            result => return result,
        }
    }
}

/// Devices of owners that died.
#[derive(Debug, Default)]
pub struct Reclaimed {
    /// Devices that their drivers have again.
    pub given: Vec<Address>,
    /// Why others have not.
    pub failures: Vec<BindError>,
}

/// Gives back what owners that died have left. A device that can't be given back keeps no other.
///
/// # Errors
/// The records can't be read.
pub fn reclaim(host: &Host, bus: &mut dyn Bus, store: &Store) -> Result<Reclaimed, BindError> {
    let begun = Instant::now();
    let (orphans, failures) = store.orphans()?;
    let mut reclaimed = Reclaimed { given: Vec::new(), failures };
    for record in orphans {
        let left = LETTING_GO.saturating_sub(begun.elapsed());
        let result = patiently(left, || release_if(host, bus, store, record.address, Record::is_orphan));
        match result {
            Ok(()) => reclaimed.given.push(record.address),
            // Another process has given it back meanwhile, or has it for a VM.
            Err(BindError::NotOurs(_)) => {}
            Err(error) => reclaimed.failures.push(error),
        }
    }
    Ok(reclaimed)
}

fn take(host: &Host, bus: &mut dyn Bus, address: Address) -> Result<(), BindError> {
    let folder = host.device_folder(address);
    step(bus, address, &folder.join("driver_override"), VFIO)?;
    if driver_of(host, address).is_some() {
        step(bus, address, &folder.join("driver/unbind"), &address.to_string())?;
    }
    step(bus, address, &host.root().join("sys/bus/pci/drivers_probe"), &address.to_string())?;
    expect_driver(host, address, VFIO)
}

fn step(bus: &mut dyn Bus, address: Address, path: &Path, content: &str) -> Result<(), BindError> {
    bus.write(path, content).map_err(|source| BindError::Step {
        address,
        step: path.display().to_string(),
        source,
    })
}

fn expect_driver(host: &Host, address: Address, wanted: &str) -> Result<(), BindError> {
    let found = driver_of(host, address);
    if found.as_deref() == Some(wanted) {
        return Ok(());
    }
    let found = found.unwrap_or_else(|| NO_DRIVER.into());
    Err(BindError::WrongDriver { address, found, wanted: wanted.into() })
}

fn driver_of(host: &Host, address: Address) -> Option<String> {
    link_name(&host.device_folder(address).join("driver"))
}

fn override_of(host: &Host, address: Address) -> Option<String> {
    text(&host.device_folder(address).join("driver_override"))
        .filter(|name| !name.is_empty() && name != "(null)")
}

fn open_in_vm(host: &Host, address: Address) -> io::Result<bool> {
    let devices = host.devices()?;
    let is_vm = |used: &Use| matches!(used, Use::Vm { .. });
    Ok(devices.get(&address).is_some_and(|device| device.uses.iter().any(is_vm)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeBus, Tree};
    use crate::plan::plan;

    fn address(text: &str) -> Address {
        text.parse().unwrap()
    }

    fn bound(
        tree: &Tree,
        bus: &mut FakeBus,
        store: &Store,
        wanted: &[&str],
        owner: Option<&Owner>,
    ) -> Result<(), BindError> {
        let host = tree.host();
        let wanted: Vec<Address> = wanted.iter().map(|a| address(a)).collect();
        let plan = plan(&host.devices().unwrap(), host.has_iommu(), &wanted, true).unwrap();
        bind(&host, bus, store, &plan, owner).map(drop)
    }

    fn drivers(tree: &Tree) -> Vec<Option<String>> {
        tree.host().devices().unwrap().into_values().map(|d| d.driver).collect()
    }

    #[test]
    fn a_device_goes_to_vfio_and_comes_back_to_its_driver() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        let before = drivers(&tree);
        bound(&tree, &mut bus, &store, &["01:00.0"], None).unwrap();
        let device = &tree.host().devices().unwrap()[&address("01:00.0")];
        assert_eq!(device.driver.as_deref(), Some(VFIO));
        assert_eq!(store.all().unwrap().len(), 1);
        release(&tree.host(), &mut bus, &store, address("01:00.0")).unwrap();
        assert_eq!(drivers(&tree), before);
        assert_eq!(store.all().unwrap(), vec![]);
        assert_eq!(tree.host().devices().unwrap()[&address("01:00.0")].driver_override, None);
    }

    #[test]
    fn a_device_that_had_no_driver_gets_none_back() {
        let tree = Tree::server();
        tree.remove_driver("0000:01:00.0");
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        bound(&tree, &mut bus, &store, &["01:00.0"], None).unwrap();
        release(&tree.host(), &mut bus, &store, address("01:00.0")).unwrap();
        assert_eq!(tree.host().devices().unwrap()[&address("01:00.0")].driver, None);
    }

    #[test]
    fn when_one_device_of_several_fails_all_are_given_back() {
        let tree = Tree::server();
        let before = drivers(&tree);
        for failing_write in 0..8 {
            let store = Store::at(tree.path().join("records"));
            let mut bus = FakeBus::new(&tree);
            bus.fail_at = Some(failing_write);
            let result = bound(&tree, &mut bus, &store, &["02:00.0", "02:00.1"], None);
            if failing_write < 6 {
                assert!(matches!(result, Err(BindError::Step { .. })), "write {failing_write}: {result:?}");
                assert_eq!(drivers(&tree), before, "write {failing_write}");
                assert_eq!(store.all().unwrap(), vec![], "write {failing_write}");
            } else {
                result.unwrap();
                for a in ["02:00.0", "02:00.1"] {
                    release(&tree.host(), &mut FakeBus::new(&tree), &store, address(a)).unwrap();
                }
            }
        }
    }

    #[test]
    fn devices_of_a_vm_that_died_are_given_back_and_those_of_a_living_one_stay() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
        let dead = Owner::new("dead", process.id()).unwrap();
        let alive = Owner::new("alive", std::process::id()).unwrap();
        // Another process that got the number later is another owner.
        let reused = Owner { started: alive.started - 1, ..alive.clone() };
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&dead)).unwrap();
        bound(&tree, &mut bus, &store, &["02:00.0"], Some(&alive)).unwrap();
        assert_eq!(reclaim(&tree.host(), &mut bus, &store).unwrap().given, vec![]);
        process.kill().unwrap();
        process.wait().unwrap();
        assert_eq!(reclaim(&tree.host(), &mut bus, &store).unwrap().given, vec![address("01:00.0")]);
        assert_eq!(store.all().unwrap().len(), 2);
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&reused)).unwrap();
        assert_eq!(reclaim(&tree.host(), &mut bus, &store).unwrap().given, vec![address("01:00.0")]);
    }

    #[test]
    fn a_device_that_cannot_be_given_back_keeps_no_other() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
        let dead = Owner::new("dead", process.id()).unwrap();
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&dead)).unwrap();
        bound(&tree, &mut bus, &store, &["02:00.0"], Some(&dead)).unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        let mut failing = FakeBus::new(&tree);
        failing.fail_at = Some(0);
        let reclaimed = reclaim(&tree.host(), &mut failing, &store).unwrap();
        assert_eq!(reclaimed.given, vec![address("02:00.0"), address("02:00.1")]);
        assert!(matches!(reclaimed.failures[..], [BindError::Return { .. }]), "{:?}", reclaimed.failures);
    }

    /// A server whose card a VM had. The VM's owner has died.
    fn with_an_orphan() -> (Tree, Store) {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let dead = Owner { vm: "dead".into(), process: 1, started: 1 }.ended();
        bound(&tree, &mut FakeBus::new(&tree), &store, &["01:00.0"], Some(&dead)).unwrap();
        (tree, store)
    }

    #[test]
    fn a_device_is_reset_between_a_vm_and_its_driver() {
        let (tree, store) = with_an_orphan();
        let mut bus = FakeBus::new(&tree);
        reclaim(&tree.host(), &mut bus, &store).unwrap();
        assert_eq!(bus.resets, [None]);
        assert_eq!(drivers(&tree)[1].as_deref(), Some("e1000e"));
    }

    #[test]
    fn a_device_whose_lock_another_has_for_a_moment_is_given_back_after_that() {
        for file in ["reset", "drivers_probe", "driver/unbind", "driver_override"] {
            let (tree, store) = with_an_orphan();
            let mut bus = FakeBus::new(&tree);
            bus.busy = Some((file, 3));
            let reclaimed = reclaim(&tree.host(), &mut bus, &store).unwrap();
            assert_eq!(reclaimed.given, [address("01:00.0")], "{file}");
            assert!(reclaimed.failures.is_empty() && bus.busy == Some((file, 0)), "{file}");
        }
        let busy = || Err(BindError::Open(address("01:00.0")));
        assert!(matches!(patiently(Duration::ZERO, busy), Err(BindError::Open(_))), "there is a limit");
    }

    #[test]
    fn a_device_that_its_driver_does_not_take_back_is_named_and_tried_again_by_the_next_command() {
        let (tree, store) = with_an_orphan();
        let host = tree.host();
        let one = Owner::new("one", std::process::id()).unwrap();
        bound(&tree, &mut FakeBus::new(&tree), &store, &["01:00.0"], Some(&one)).unwrap();
        assert!(
            reclaim(&host, &mut FakeBus::new(&tree), &store).unwrap().given.is_empty(),
            "its owner lives"
        );
        let mut bus = FakeBus::new(&tree);
        bus.broken = Some("e1000e");
        // The VM has ended, its owner lives on.
        let said = give_back(&host, &mut bus, &store, address("01:00.0")).unwrap_err().to_string();
        for part in ["01:00.0 is not given back", "no driver instead of e1000e", "dmesg", "tombolo clean"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let again = reclaim(&host, &mut bus, &store).unwrap();
        assert!(matches!(again.failures[..], [BindError::NotTakenBack { .. }]), "{:?}", again.failures);
        assert_eq!(bus.resets.len(), 2);
        assert_eq!(reclaim(&host, &mut FakeBus::new(&tree), &store).unwrap().given, [address("01:00.0")]);
    }

    #[test]
    fn a_device_that_has_gone_to_another_vm_meanwhile_is_not_taken_from_it() {
        let (tree, store) = with_an_orphan();
        let (host, mut bus) = (tree.host(), FakeBus::new(&tree));
        let one = Owner::new("one", std::process::id()).unwrap();
        // After a look for orphans that found it.
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&one)).unwrap();
        let late = release_if(&host, &mut bus, &store, address("01:00.0"), Record::is_orphan);
        assert!(matches!(late, Err(BindError::NotOurs(_))), "{late:?}");
        assert_eq!(drivers(&tree)[1].as_deref(), Some(VFIO));
    }

    #[test]
    fn a_record_that_is_damaged_is_named_and_keeps_no_other_device() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        let dead = Owner { vm: "dead".into(), process: 1, started: u64::MAX };
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&dead)).unwrap();
        bound(&tree, &mut bus, &store, &["02:00.0"], Some(&dead)).unwrap();
        fs::write(store.path(address("01:00.0")), "{\"address\": ").unwrap();
        let reclaimed = reclaim(&tree.host(), &mut bus, &store).unwrap();
        assert_eq!(reclaimed.given, vec![address("02:00.0"), address("02:00.1")]);
        let said = reclaimed.failures[0].to_string();
        assert!(said.contains("is damaged") && said.contains("lspci -k"), "{said}");
    }

    #[test]
    fn a_device_of_a_living_vm_goes_to_no_other_vm() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        // Two plans that were made before either was carried out, and one after.
        let wanted = [address("01:00.0")];
        let early = plan(&tree.host().devices().unwrap(), tree.host().has_iommu(), &wanted, true).unwrap();
        let one = Owner::new("one", std::process::id()).unwrap();
        let two = Owner { vm: "two".into(), ..one.clone() };
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&one)).unwrap();
        for late in [
            bind(&tree.host(), &mut bus, &store, &early, Some(&two)).map(drop),
            bound(&tree, &mut bus, &store, &["01:00.0"], Some(&two)),
            bound(&tree, &mut bus, &store, &["01:00.0"], None),
        ] {
            let said = late.unwrap_err().to_string();
            assert!(said.contains("belongs to the VM one"), "{said}");
        }
        // The VM itself starts anew.
        bound(&tree, &mut bus, &store, &["01:00.0"], Some(&one)).unwrap();
        release(&tree.host(), &mut bus, &store, address("01:00.0")).unwrap();
    }

    #[test]
    fn a_device_whose_binding_was_killed_at_any_step_goes_back_to_its_first_driver() {
        for killed_at in 0..3 {
            let tree = Tree::server();
            let before = drivers(&tree);
            let store = Store::at(tree.path().join("records"));
            let mut bus = FakeBus::new(&tree);
            bus.killed_at = Some(killed_at);
            let host = tree.host();
            let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                bound(&tree, &mut bus, &store, &["01:00.0"], None)
            }));
            assert!(killed.is_err(), "{killed_at}");
            // Run again, and given back.
            bound(&tree, &mut FakeBus::new(&tree), &store, &["01:00.0"], None).unwrap();
            release(&host, &mut FakeBus::new(&tree), &store, address("01:00.0")).unwrap();
            assert_eq!(drivers(&tree), before, "killed at {killed_at}");
            assert_eq!(host.devices().unwrap()[&address("01:00.0")].driver_override, None);
        }
    }

    #[test]
    fn what_was_not_bound_here_is_not_released() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let result = release(&tree.host(), &mut FakeBus::new(&tree), &store, address("01:00.0"));
        assert!(matches!(result, Err(BindError::NotOurs(_))));
    }

    #[test]
    fn a_device_that_was_unplugged_while_bound_leaves_no_record() {
        let tree = Tree::server();
        let store = Store::at(tree.path().join("records"));
        let mut bus = FakeBus::new(&tree);
        bound(&tree, &mut bus, &store, &["01:00.0"], None).unwrap();
        tree.unplug("0000:01:00.0");
        release(&tree.host(), &mut bus, &store, address("01:00.0")).unwrap();
        assert_eq!(store.all().unwrap(), vec![]);
    }
}
