// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A project of VMs that lives as long as one bench, driven through the `tombolo` command as a user drives it.

pub mod interrupt;
pub mod kit;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use tombolo_program::EXECUTED_BY;

/// Returns the `tombolo` that a bench drives: the one that started the bench, or the one beside the bench's own program, or the one in
/// PATH.
#[must_use]
pub fn tombolo() -> PathBuf {
    if let Some(program) = env::var_os(EXECUTED_BY) {
        return program.into();
    }
    let beside = env::current_exe().ok().map(|own| own.with_file_name("tombolo"));
    beside.filter(|program| program.is_file()).unwrap_or_else(|| "tombolo".into())
}

/// A running project; `down` at the end, also when the bench fails.
pub struct Project {
    tombolo: PathBuf,
    file: PathBuf,
}

impl Project {
    /// Writes `compose` to `<dir>/tombolo.toml` and starts it.
    pub fn up(dir: &Path, compose: &str) -> Result<Project> {
        let project = Project::declare(dir, compose)?;
        project.start(&[])?;
        Ok(project)
    }

    /// Writes `compose` to `<dir>/tombolo.toml`, whose VMs [`Project::start`] starts.
    pub fn declare(dir: &Path, compose: &str) -> Result<Project> {
        let file = dir.join("tombolo.toml");
        fs::write(&file, compose).with_context(|| format!("can't write {}", file.display()))?;
        Ok(Project { tombolo: tombolo(), file })
    }

    /// Starts these VMs, or all where none is named, and waits until they are up.
    pub fn start(&self, vms: &[String]) -> Result<()> {
        let status = self.command("up").args(vms).status().context("can't run 'tombolo up'")?;
        if !status.success() {
            bail!("'tombolo up' failed for {} ({status}); what it said stands above", self.file.display());
        }
        Ok(())
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.tombolo);
        command.arg(verb).arg("-f").arg(&self.file);
        command
    }

    /// The command that runs a program in a VM, with its standard streams passed on.
    pub fn program(&self, vm: &str, program: &str) -> Command {
        let mut command = self.command("exec");
        command.args(["-i", vm, "--", program]);
        command
    }

    fn run(&self, vm: &str, script: &str) -> Result<Output> {
        self.command("exec")
            .arg(vm)
            .args(["--", "sh", "-c", script])
            .stdin(Stdio::null())
            .output()
            .context("can't run 'tombolo exec'")
    }

    /// Runs a shell script in a VM and returns its standard output; an exit code other than 0 is an error with what it said.
    pub fn exec(&self, vm: &str, script: &str) -> Result<String> {
        interrupt::check()?;
        let output = self.run(vm, script)?;
        if !output.status.success() {
            bail!(
                "in VM {vm}, {}: {script}\n{}{}",
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a command on the project with --json and returns what it printed; an exit code other than 0 is an error.
    pub fn json(&self, verb: &str, args: &[&str]) -> Result<serde_json::Value> {
        interrupt::check()?;
        let mut command = self.command(verb);
        command.arg("--json").args(args).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().with_context(|| format!("can't run 'tombolo {verb}'"))?;
        if !output.status.success() {
            bail!("'tombolo {verb} --json' failed ({}); what it said stands above", output.status);
        }
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("'tombolo {verb} --json' printed no JSON"))
    }

    /// Runs a command on the project, with the words of its subcommand before the option that names the project; returns its standard output.
    ///
    /// # Errors
    /// Its exit code is not 0.
    pub fn tombolo(&self, verb: &str, words: &[&str]) -> Result<String> {
        interrupt::check()?;
        let mut command = Command::new(&self.tombolo);
        let (subcommand, words) = if verb == "mpi" { words.split_at(1) } else { words.split_at(0) };
        command.arg(verb).args(subcommand).arg("-f").arg(&self.file).args(words);
        let output =
            command.stdin(Stdio::null()).output().with_context(|| format!("can't run 'tombolo {verb}'"))?;
        if !output.status.success() {
            bail!(
                "'tombolo {verb}' failed ({}): {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn ps(&self) -> Result<serde_json::Value> {
        self.json("ps", &[])
    }

    fn vm(&self, name: &str) -> Result<serde_json::Value> {
        let ps = self.ps()?;
        let mut vms = ps["vms"].as_array().into_iter().flatten();
        let vm = vms.find(|vm| vm["name"] == name).cloned();
        vm.with_context(|| format!("'tombolo ps --json' names no VM {name}: {ps}"))
    }

    /// The process of a network's switch.
    pub fn switch(&self, net: &str) -> Result<u64> {
        let ps = self.ps()?;
        let mut networks = ps["networks"].as_array().into_iter().flatten();
        let pid = networks.find(|n| n["name"] == net).and_then(|n| n["pid"].as_u64());
        pid.with_context(|| format!("'tombolo ps --json' names no switch of {net}: {ps}"))
    }

    /// QEMU's process of a VM.
    pub fn process(&self, vm: &str) -> Result<u32> {
        let entry = self.vm(vm)?;
        let pid = entry["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        pid.with_context(|| format!("'tombolo ps --json' names no process of VM {vm}: {entry}"))
    }

    /// The hypervisor of a VM, "kvm" or "tcg".
    pub fn hypervisor(&self, vm: &str) -> Result<String> {
        let entry = self.vm(vm)?;
        let name = entry["hypervisor"].as_str().map(str::to_lowercase);
        name.with_context(|| format!("'tombolo ps --json' does not say how VM {vm} runs: {entry}"))
    }

    /// The host's CPUs on which a VM with `topology` lies, by virtual CPU.
    pub fn host_cpus(&self, vm: &str) -> Result<Vec<u32>> {
        let entry = self.vm(vm)?;
        let vcpus = entry["placement"]["plan"]["vcpus"].as_array();
        let host = |vcpu: &serde_json::Value| vcpu["host"].as_u64().and_then(|cpu| u32::try_from(cpu).ok());
        let cpus = vcpus.and_then(|vcpus| vcpus.iter().map(host).collect::<Option<Vec<u32>>>());
        cpus.with_context(|| format!("'tombolo ps --json' does not say where VM {vm} lies: {entry}"))
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        match self.command("down").stdout(Stdio::null()).status() {
            Ok(status) if status.success() => {}
            other => eprintln!("tombolo bench: 'tombolo down' failed for {}: {other:?}", self.file.display()),
        }
    }
}
