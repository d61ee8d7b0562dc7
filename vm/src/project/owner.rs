// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server of an accelerator that a VM owns: `tombolo accel serve` in that VM, started through its agent each time the VM has booted, and
//! kept running there by a few lines of shell.
//!
//! The owner VM is a member of each client VM's zone, so calls and data pass between the two VMs; this process keeps the zones and their
//! doorbells, clears channels that the server is done with, and says in the zones that the owner died.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use tombolo_control::accel::{Guest, Listing};

use crate::guest::exec::{self, Output};
use crate::guest::mount;
use crate::machine::{Machine, Phase};

/// Time for a guest to load its driver and start the server; an emulated one under load is slow.
const START: Duration = Duration::from_secs(300);
/// Time for a guest to answer `ps`.
const LOOK: Duration = Duration::from_millis(600);
/// A guest that has not answered for so long does not answer.
const SILENT: Duration = Duration::from_secs(10);

/// Functions for both scripts below. `device` makes the device of the zone with the uuid $1 and the identity $2, which is the same without dashes.
const DEVICE: &str = r#"device() {
	await_zone "$2"
	[ -c "/dev/tombolo-serve-$1" ] || echo "$1" >/sys/module/tombolo/parameters/serve && return
	module_said
	return 1
}
# Whole or not at all: a server may begin at any moment.
note() {
	printf '%s\n' "$3" >"$1/$2.new" && mv "$1/$2.new" "$1/guests/$2"
}
"#;

/// $1 names the accelerator, $2 is an option of the server or empty; three words follow for each client VM: its zone's uuid, the same
/// without dashes, and what the server is told of it. Says which zones this guest can't have.
const SERVE: &str = r#"need_module
name=$1 option=$2
shift 2
command -v tombolo >/dev/null || exit 5
devices=$(tombolo accel devices 2>&1) || { echo "$devices" >&2; exit 6; }
run=/run/tombolo-accel-$name
rm -rf "$run"
mkdir -p "$run/guests"
while [ $# -gt 0 ]; do
	if device "$1" "$2"; then
		note "$run" "$1" "$3"
	else
		echo "$1"
	fi
	shift 3
done
set -- tombolo accel serve --control "$run/control" --guests "$run/guests" $option
# An initramfs can't be left by pivot_root, which keeps workers from it; a mount of it can.
if awk '$5 == "/" && / - rootfs / { found = 1 } END { exit !found }' /proc/self/mountinfo; then
	mkdir "$run/root"
	set -- unshare -m sh -c 'mount --rbind / "$0" && cd "$0" && mount --move . / && exec chroot . "$@"' "$run/root" "$@"
fi
# Started again when it ends: its clients' calls have failed then, and the next ones find a server.
keep='run=$1
shift
while :; do
	"$@"
	echo "tombolo accel: the server has ended with $? and is started again"
	: >"$run/ended"
	sleep 1
done'
setsid sh -c "$keep" keep "$run" "$@" </dev/null >>"$run/log" 2>&1 &
looks=0
until [ -S "$run/control" ]; do
	looks=$((looks + 1))
	if [ -e "$run/ended" ] || [ "$looks" -ge 1200 ]; then
		kill -- "-$!"
		tail -n 8 "$run/log" >&2
		exit 7
	fi
	sleep 0.1
done"#;

/// $1 names the accelerator; then one client VM's words, as above, whose devices have come while the server runs. A server that is just being started again
/// finds the client among its guests, or answers soon.
const JOIN: &str = r#"run=/run/tombolo-accel-$1
[ -d "$run/guests" ] || exit 8
device "$2" "$3" || exit 4
note "$run" "$2" "$4"
looks=0
until said=$(tombolo accel join --control "$run/control" "$run/guests/$2" 2>&1); do
	looks=$((looks + 1))
	if [ "$looks" -ge 100 ]; then
		rm "$run/guests/$2"
		echo "$said" >&2
		exit 7
	fi
	sleep 0.3
done"#;

/// A client VM's zone, and what the server is told of it.
#[derive(Debug)]
pub struct Client {
    /// The VM.
    pub vm: String,
    pub uuid: String,
    /// The request to the server, as `tombolo accel serve --guests` takes it.
    pub guest: Guest,
}

impl Client {
    /// The arguments of scripts: the zone's uuid, the same without dashes, and the request to the server.
    fn words(&self) -> anyhow::Result<[String; 3]> {
        Ok([self.uuid.clone(), self.uuid.replace('-', ""), serde_json::to_string(&self.guest)?])
    }
}

/// The path of a zone's device in the owner VM.
pub fn device(uuid: &str) -> String {
    format!("/dev/tombolo-serve-{uuid}")
}

/// The VM that owns an accelerator.
#[derive(Debug)]
pub struct Owner {
    vm: String,
    present: Mutex<Present>,
}

#[derive(Debug, Default)]
struct Present {
    machine: Weak<Machine>,
    /// The number of starts of its server.
    starts: u32,
    /// The time since which a thread asks the guest for the listing.
    asking: Option<Instant>,
    /// The last listing.
    listing: Option<Listing>,
}

impl Owner {
    /// The VM of this name, which has not been started yet.
    pub fn new(vm: &str) -> Owner {
        Owner { vm: vm.to_owned(), present: Mutex::default() }
    }

    /// The VM that an earlier supervisor has told to serve; none: it does not run.
    pub fn adopt(vm: &str, machine: Option<&Arc<Machine>>) -> Owner {
        let machine = machine.map(Arc::downgrade).unwrap_or_default();
        let present = Present { machine, starts: 1, ..Present::default() };
        Owner { vm: vm.to_owned(), present: Mutex::new(present) }
    }

    pub fn vm(&self) -> &str {
        &self.vm
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of starts of its server.
    pub fn starts(&self) -> u32 {
        self.lock().starts
    }

    /// The VM's state in the words of `ps`, if it doesn't run.
    pub fn absence(&self) -> Option<String> {
        match self.lock().machine.upgrade().map(|m| m.phase()) {
            Some(Phase::Up | Phase::Booting) => None,
            _ => Some(format!("'{}' is not up", self.vm)),
        }
    }

    /// That its guest does not answer, in the words of `ps`.
    pub fn silence(&self) -> Option<String> {
        let silent = self.lock().asking.map(|since| since.elapsed()).filter(|silent| *silent > SILENT)?;
        Some(format!("does not answer: the guest agent of '{}' has not for {} s", self.vm, silent.as_secs()))
    }

    /// The VM, where it runs and was told to serve since it has booted.
    pub fn serving(&self) -> Option<Arc<Machine>> {
        self.lock().machine.upgrade().filter(|machine| machine.phase() == Phase::Up)
    }

    /// Starts the server in the VM, which has just booted, and waits until it serves; uuids of the zones that the guest can't have are returned.
    ///
    /// # Errors
    /// The guest lacks something. Names it and the remedy.
    pub fn serve(
        &self,
        accelerator: &str,
        unconfined: bool,
        clients: &[Client],
        machine: &Arc<Machine>,
    ) -> anyhow::Result<Vec<String>> {
        {
            let mut present = self.lock();
            present.machine = Arc::downgrade(machine);
            present.starts += 1;
            present.listing = None;
        }
        let mut words = vec![accelerator.to_owned(), if unconfined { "--unconfined" } else { "" }.to_owned()];
        for client in clients {
            words.extend(client.words()?);
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let script = format!("{}{DEVICE}{SERVE}", mount::FUNCTIONS);
        let output = exec::script(machine.agent(), &script, &words, START)?;
        result(&self.vm, accelerator, &output)?;
        Ok(output.out.lines().map(str::to_owned).collect())
    }

    /// Has the server, which runs, serve one more client, whose zone has come to the VM.
    ///
    /// # Errors
    /// Why the guest can't have the zone, or the server doesn't take the client.
    pub fn join(&self, accelerator: &str, client: &Client, machine: &Machine) -> anyhow::Result<()> {
        let [uuid, identity, guest] = client.words()?;
        let words = [accelerator, &uuid, &identity, &guest];
        let script = format!("{}{DEVICE}{JOIN}", mount::FUNCTIONS);
        let output = exec::script(machine.agent(), &script, &words, START)?;
        let said = output.err.trim().trim_start_matches("tombolo: ").replace('\n', "; ");
        let (vm, owner) = (&client.vm, &self.vm);
        match output.code {
            0 => Ok(()),
            4 => anyhow::bail!(
                "the VM '{owner}', which owns accel.{accelerator}, can't have the zone of '{vm}': {said}"
            ),
            8 => anyhow::bail!(
                "the VM '{owner}' owns accel.{accelerator} and has no server that '{vm}' could join: tombolo down {owner} && tombolo up"
            ),
            _ => anyhow::bail!(
                "the server of accel.{accelerator} in the VM '{owner}' doesn't take the VM '{vm}': {said}"
            ),
        }
    }

    /// The server's listing; the last one, if the guest doesn't answer soon. One thread at a time asks the guest.
    pub fn look(self: &Arc<Self>, accelerator: &str) -> Option<Listing> {
        let machine = {
            let mut present = self.lock();
            let machine = present.machine.upgrade().filter(|m| m.phase() == Phase::Up)?;
            if present.asking.is_some() {
                return present.listing.clone();
            }
            present.asking = Some(Instant::now());
            machine
        };
        let (sender, answered) = mpsc::channel();
        let (own, accelerator) = (self.clone(), accelerator.to_owned());
        let asking = crate::thread::start("look", move || {
            let listing = ask(&own.vm, &accelerator, &machine);
            let mut present = own.lock();
            (present.asking, present.listing) = (None, listing);
            // A late answer has no receiver.
            let _late = sender.send(());
        });
        if asking.is_err() {
            self.lock().asking = None;
        }
        // Whichever comes first: the listing stands there, or the last one does.
        let _late = answered.recv_timeout(LOOK);
        self.lock().listing.clone()
    }
}

/// Asks a guest for the listing of the server in it.
fn ask(vm: &str, accelerator: &str, machine: &Machine) -> Option<Listing> {
    const LS: &str = r#"exec tombolo accel --json ls --control "/run/tombolo-accel-$1/control""#;
    let output = exec::script(machine.agent(), LS, &[accelerator], START).ok()?;
    let listing = serde_json::from_str::<Vec<Listing>>(&output.out).ok()?.into_iter().next()?;
    Some(Listing { vm: Some(vm.to_owned()), ..listing })
}

/// The result of the request to serve.
fn result(vm: &str, accelerator: &str, output: &Output) -> anyhow::Result<()> {
    let said = output.err.trim().trim_start_matches("tombolo: ").replace('\n', "; ");
    match output.code {
        0 => Ok(()),
        3 => anyhow::bail!(
            "the VM '{vm}' owns accel.{accelerator}, but is a guest without the module: its kernel {} can't have its clients' zones; \
             use the guest kit, or install tombolo-dkms in the image",
            output.out.trim()
        ),
        5 => anyhow::bail!(
            "the VM '{vm}' owns accel.{accelerator}, but has no program 'tombolo', which serves it; install the package tombolo in the image"
        ),
        6 => anyhow::bail!("the VM '{vm}' owns accel.{accelerator}, but has nothing to serve: {said}"),
        7 => anyhow::bail!("the VM '{vm}' owns accel.{accelerator}, but its server does not begin: {said}"),
        code => anyhow::bail!("the VM '{vm}' can't serve accel.{accelerator} (code {code}): {said}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(code: i64, out: &str, err: &str) -> String {
        let output = Output { code, out: out.into(), err: err.into() };
        result("owner", "gpu", &output).expect_err("a code").to_string()
    }

    #[test]
    fn what_an_owner_lacks_is_named_with_the_remedy() {
        let e = message(3, "6.1.0-amd64\n", "");
        assert!(e.contains("kernel 6.1.0-amd64") && e.contains("tombolo-dkms"), "{e}");
        assert!(message(5, "", "").ends_with("install the package tombolo in the image"));
        let none = "tombolo: no OpenCL device on this machine; install a driver (Debian: pocl-opencl-icd)\n";
        let e = message(6, "", none);
        assert!(e.contains("has nothing to serve: no OpenCL device") && e.contains("pocl-opencl-icd"), "{e}");
        let e = message(7, "", "tombolo accel: workers can't be confined here\ntombolo accel: ended\n");
        assert!(e.contains("confined here; tombolo accel: ended"), "{e}");
    }

    #[test]
    fn the_scripts_are_such_that_a_shell_understands() {
        for script in [SERVE, JOIN] {
            let script = format!("{}{DEVICE}{script}", mount::FUNCTIONS);
            let shell = std::process::Command::new("/bin/sh").args(["-n", "-c", &script]).output().unwrap();
            assert!(shell.status.success(), "{}", String::from_utf8_lossy(&shell.stderr));
        }
    }
}
