// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Other projects' programs that the bench runs. They end with the bench, even if it is killed, and their files under /run are removed.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

/// A running program.
pub(crate) struct Peer {
    pub child: Child,
    /// The name of DPDK's folder under /run.
    prefix: Option<String>,
}

impl Peer {
    /// Starts `command`, which is in Debian's `package`.
    pub fn start(mut command: Command, package: &str) -> anyhow::Result<Self> {
        // SAFETY: between fork and exec one system call is made, nothing allocates.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("{program} (package {package})"))?;
        Ok(Self { child, prefix: None })
    }

    /// Returns testpmd's command with the common arguments; `tell`: the name of this instance.
    pub fn testpmd(tell: &str) -> (Command, String) {
        // Unbuffered output, though it is no terminal.
        let mut command = Command::new("stdbuf");
        let prefix = format!("{tell}{}", std::process::id());
        command.args(["-oL", "dpdk-testpmd", "--no-huge", "-m", "512", "--no-pci", "--no-telemetry"]);
        command.arg(format!("--file-prefix={prefix}")).stdin(Stdio::piped()).stderr(Stdio::null());
        (command, prefix)
    }

    /// The same with the folder that DPDK makes for `prefix` removed at the end.
    pub fn with_prefix(mut self, prefix: String) -> Self {
        self.prefix = Some(prefix);
        self
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
        if let Some(prefix) = &self.prefix {
            // SAFETY: asks for a number.
            let root = unsafe { libc::geteuid() } == 0;
            let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|_| !root).map(PathBuf::from);
            let base = own.unwrap_or_else(|| if root { "/var/run".into() } else { "/tmp".into() });
            // A program that ended by itself has removed it.
            let _gone = std::fs::remove_dir_all(base.join("dpdk").join(prefix));
        }
    }
}

/// The programs of Open vSwitch, with all of their files in one folder.
struct OvsPrograms<'a> {
    dir: &'a Path,
}

impl OvsPrograms<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .envs(["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"].map(|name| (name, self.dir)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// The address of the database.
    fn socket(&self) -> String {
        format!("unix:{}", self.dir.join("db").display())
    }

    /// Makes a database and starts its server.
    fn database(&self) -> anyhow::Result<Peer> {
        let database = self.dir.join("conf.db");
        let schema = "/usr/share/openvswitch/vswitch.ovsschema";
        finish(self.command("ovsdb-tool").arg("create").arg(&database).arg(schema))?;
        let mut server = self.command("ovsdb-server");
        server.arg(&database).arg(format!("--remote=p{}", self.socket())).arg("--no-chdir");
        server.arg(format!("--unixctl={}", self.dir.join("db.ctl").display()));
        Peer::start(server, OVS)
    }

    /// Runs a command of ovs-vsctl.
    fn configure(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command("ovs-vsctl");
        finish(command.arg(format!("--db={}", self.socket())).arg("--timeout=20").args(args))
    }

    /// Starts the switch in a network namespace.
    fn switch(&self, control: &Path) -> anyhow::Result<Peer> {
        let mut switch = self.command("unshare");
        switch.args(["-n", "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"]).arg(self.socket());
        switch.arg(format!("--unixctl={}", control.display()));
        Peer::start(switch, OVS)
    }

    /// Adds the bridge, its two ports and its two rules.
    fn add_bridge(&self, mtu: u32) -> anyhow::Result<()> {
        let mtu = format!("mtu_request={}", mtu.max(1500));
        let mut add = vec!["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"];
        for port in ["s0", "s1"] {
            add.extend(["--", "add-port", "br0", port]);
            add.extend(["--", "set", "Interface", port, "type=dpdkvhostuser", &mtu]);
        }
        self.configure(&add)
            .context("Open vSwitch takes no ports; it needs root, for a network namespace")?;
        let bridge = self.dir.join("br0.mgmt");
        for (from, to) in [("s0", "s1"), ("s1", "s0")] {
            let rule = format!("priority=1,in_port={from},actions=output:{to}");
            finish(self.command("ovs-ofctl").arg("add-flow").arg(&bridge).arg(rule))?;
        }
        Ok(())
    }
}

/// Open vSwitch with DPDK: an instance of its own, whose database, sockets and logs are in a folder of the bench, and whose bridge is in a
/// network namespace that ends with it.
pub(crate) struct Ovs {
    _database: Peer,
    pub switch: Peer,
    control: PathBuf,
}

const OVS: &str = "openvswitch-switch-dpdk";

impl Ovs {
    /// Starts a bridge with the ports s0 and s1, whose sockets are in `dir`. Its only rules forward frames from one to the other: the
    /// load's frames come back with their own address, so the bridge can't learn. One thread polls, on `poll_cpu`; the others are on
    /// `main_cpu`.
    pub fn start(dir: &Path, main_cpu: usize, poll_cpu: usize, mtu: u32) -> anyhow::Result<Self> {
        let programs = OvsPrograms { dir };
        let database = programs.database()?;
        let prefix = format!("tovs{}", std::process::id());
        // It waits until the database answers.
        programs.configure(&[
            "--retry",
            "--no-wait",
            "set",
            "Open_vSwitch",
            ".",
            "other_config:dpdk-init=true",
            &format!("other_config:dpdk-lcore-mask={:#x}", 1u64 << main_cpu),
            &format!("other_config:pmd-cpu-mask={:#x}", 1u64 << poll_cpu),
            "other_config:vhost-sock-dir=.",
            // Without --legacy-mem it adds --in-memory, which --no-huge does not go with.
            &format!(
                "other_config:dpdk-extra=--no-huge --legacy-mem -m 256 --no-pci --no-telemetry --file-prefix={prefix}"
            ),
        ])?;
        let control = dir.join("switch.ctl");
        let switch = programs.switch(&control)?.with_prefix(prefix);
        programs.add_bridge(mtu)?;
        Ok(Self { _database: database, switch, control })
    }

    /// Waits until both ports are polled: after a guest connects, OVS sets up their memory again, which takes seconds.
    pub fn wait_for_ports(&self) -> anyhow::Result<()> {
        let end = Instant::now() + Duration::from_secs(30);
        // A port that is about to be set up again is still listed, so it must stay listed.
        let mut seen = 0;
        while seen < 5 {
            anyhow::ensure!(Instant::now() < end, "Open vSwitch does not poll both ports");
            std::thread::sleep(Duration::from_millis(200));
            let mut ask = Command::new("ovs-appctl");
            let output = ask.arg("-t").arg(&self.control).arg("dpif-netdev/pmd-rxq-show").output()?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let listed = |port: &str| text.split_whitespace().any(|word| word == port);
            seen = if listed("s0") && listed("s1") { seen + 1 } else { 0 };
        }
        Ok(())
    }
}

fn finish(command: &mut Command) -> anyhow::Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output =
        command.stderr(Stdio::piped()).output().with_context(|| format!("{program} (package {OVS})"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{program}: {}", said.trim());
    Ok(())
}
