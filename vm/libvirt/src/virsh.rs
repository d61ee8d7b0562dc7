// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Domains through `virsh`, at the connection that `LIBVIRT_DEFAULT_URI` names (else libvirt's default).

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::domain::Domain;

fn virsh(arguments: &[&str], input: Option<&str>) -> anyhow::Result<String> {
    let mut command = Command::new("virsh");
    command.arg("--quiet").args(arguments).env("LC_ALL", "C");
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = spawned.context("virsh can't be run; install the package libvirt-clients")?;
    if let (Some(text), Some(mut pipe)) = (input, child.stdin.take()) {
        pipe.write_all(text.as_bytes()).context("writing to virsh")?;
    }
    let output = child.wait_with_output().context("waiting for virsh")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("virsh {}: {}", arguments.join(" "), said.trim().trim_start_matches("error: "));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The domain as it starts next.
///
/// # Errors
/// There is none of this name, or libvirt is not reached.
pub fn load(name: &str) -> anyhow::Result<Domain> {
    let text = virsh(&["dumpxml", "--inactive", "--security-info", name], None)?;
    Domain::parse(&text)
}

/// Defines the domain anew. It has the changes from its next start on.
///
/// # Errors
/// libvirt refuses the XML.
pub fn define(domain: &Domain) -> anyhow::Result<()> {
    virsh(&["define", "/dev/stdin"], Some(&domain.text()?)).map(drop)
}

/// Returns whether the domain runs now.
///
/// # Errors
/// As [`load`].
pub fn is_running(name: &str) -> anyhow::Result<bool> {
    Ok(virsh(&["domstate", name], None)?.trim() != "shut off")
}
