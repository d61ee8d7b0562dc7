// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs of others that the bench runs: they end with the bench, however that ends, and what they leave under /run is
//! removed.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::Context;

/// A running program.
pub(super) struct Peer {
    pub child: Child,
    /// What DPDK calls its folder under /run.
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

    /// testpmd, with the arguments that all of ours have; `tell`: which of them it is.
    pub fn testpmd(tell: &str) -> (Command, String) {
        // It says things when it says them, though nobody sits at a terminal.
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
            // Whoever ended properly has removed it.
            let _gone = std::fs::remove_dir_all(base.join("dpdk").join(prefix));
        }
    }
}

/// Open vSwitch with DPDK: an instance of its own, whose database, sockets and logs are in a folder of ours, and whose
/// bridge is in a network namespace that ends with it.
pub(super) struct Ovs {
    _database: Peer,
    pub switch: Peer,
}

const OVS: &str = "openvswitch-switch-dpdk";

impl Ovs {
    /// A bridge with the ports s0 and s1, whose sockets are in `dir`; frames go by the addresses that it learns, its only
    /// rule. One thread polls, on `poll_cpu`; the others are on `main_cpu`.
    pub fn start(dir: &Path, main_cpu: usize, poll_cpu: usize, mtu: u32) -> anyhow::Result<Self> {
        let database = dir.join("conf.db");
        let socket = format!("unix:{}", dir.join("db").display());
        let env = ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"];
        let command = |program: &str| {
            let mut command = Command::new(program);
            command.envs(env.map(|name| (name, dir)));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        let schema = "/usr/share/openvswitch/vswitch.ovsschema";
        finish(command("ovsdb-tool").arg("create").arg(&database).arg(schema))?;
        let mut server = command("ovsdb-server");
        server.arg(&database).arg(format!("--remote=p{socket}")).arg("--no-chdir");
        server.arg(format!("--unixctl={}", dir.join("db.ctl").display()));
        let server = Peer::start(server, OVS)?;
        let prefix = format!("tovs{}", std::process::id());
        let set = |args: &[&str]| {
            finish(command("ovs-vsctl").arg(format!("--db={socket}")).arg("--timeout=20").args(args))
        };
        // It waits until the database answers.
        set(&[
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
                "other_config:dpdk-extra=--no-huge --legacy-mem -m 1024 --no-pci --no-telemetry --file-prefix={prefix}"
            ),
        ])?;
        let mut switch = command("unshare");
        switch.args(["-n", "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"]).arg(&socket);
        switch.arg(format!("--unixctl={}", dir.join("switch.ctl").display()));
        let switch = Peer::start(switch, OVS)?.with_prefix(prefix);
        let mtu = format!("mtu_request={}", mtu.max(1500));
        let mut add = vec!["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"];
        for port in ["s0", "s1"] {
            add.extend([
                "--",
                "add-port",
                "br0",
                port,
                "--",
                "set",
                "Interface",
                port,
                "type=dpdkvhostuser",
                &mtu,
            ]);
        }
        set(&add).context("Open vSwitch takes no ports; it needs root, for a network namespace")?;
        Ok(Self { _database: server, switch })
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
