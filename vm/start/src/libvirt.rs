// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Fast start of existing libvirt domains: the XML that gives a domain its growing memory, and its monitor through
//! `virsh qemu-monitor-command`.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::layout::{Layout, step};
use crate::monitor::{Monitor, MonitorError};

/// The alias that [`xml`] gives the device; libvirt keeps aliases that begin with `ua-`.
pub const ALIAS: &str = "ua-tombolo-memory";

/// Changes to a domain's XML for `layout`: what to set and what to add, with the place of each in a comment.
pub fn xml(layout: &Layout) -> String {
    let kib = |bytes: u64| bytes / 1024;
    let (boot, all) = (kib(layout.boot), kib(layout.boot + layout.grown));
    let (size, block) = (kib(layout.grown), kib(layout.block));
    format!(
        "<!-- in <domain>, in place of <memory> and <currentMemory> -->\n\
         <maxMemory slots='16' unit='KiB'>{all}</maxMemory>\n\
         <memory unit='KiB'>{boot}</memory>\n\
         <currentMemory unit='KiB'>{boot}</currentMemory>\n\
         <memoryBacking>\n  <source type='memfd'/>\n  <access mode='shared'/>\n</memoryBacking>\n\
         <!-- in <cpu>: a domain with hot-plugged memory needs a NUMA node -->\n\
         <numa>\n  <cell id='0' cpus='0-N' memory='{boot}' unit='KiB' memAccess='shared'/>\n</numa>\n\
         <!-- in <devices> -->\n\
         <memory model='virtio-mem'>\n  <target>\n    <size unit='KiB'>{size}</size>\n    <node>0</node>\n    \
         <block unit='KiB'>{block}</block>\n    <requested unit='KiB'>0</requested>\n  </target>\n  \
         <alias name='{ALIAS}'/>\n</memory>\n\
         <!-- in the guest: the kernel argument {arguments}, or in {rule}:\n{text}\
         then, once it runs: tombolo grow DOMAIN -->\n",
        arguments = crate::guest::KERNEL_ARGUMENTS,
        rule = crate::guest::UDEV_RULE_PATH,
        text = crate::guest::UDEV_RULE
            .lines()
            .filter(|l| !l.starts_with('#'))
            .map(|l| format!("{l}\n"))
            .collect::<String>(),
    )
}

/// The monitor of a running domain.
pub struct Virsh {
    domain: String,
    program: String,
}

impl Virsh {
    /// The monitor of `domain`, by the `virsh` in PATH.
    pub fn domain(domain: &str) -> Self {
        Self { domain: domain.into(), program: "virsh".into() }
    }

    fn call(&self, arguments: &[&str]) -> Result<String, MonitorError> {
        let result = Command::new(&self.program).args(arguments).output().map_err(|e| {
            MonitorError::Transport(format!("{}: {e} (package libvirt-clients)", self.program))
        })?;
        if result.status.success() {
            return Ok(String::from_utf8_lossy(&result.stdout).into_owned());
        }
        Err(MonitorError::Transport(String::from_utf8_lossy(&result.stderr).trim().to_owned()))
    }

    /// The domain's QEMU process, as libvirt's run folder names it.
    pub fn pid(&self) -> Result<u32, MonitorError> {
        let path = format!("/run/libvirt/qemu/{}.pid", self.domain);
        let text =
            std::fs::read_to_string(&path).map_err(|e| MonitorError::Transport(format!("{path}: {e}")))?;
        text.trim().parse().map_err(|_| MonitorError::Transport(format!("{path} holds no process id")))
    }
}

impl Monitor for Virsh {
    fn execute(&mut self, command: &'static str, arguments: Value) -> Result<Value, MonitorError> {
        let line = json!({"execute": command, "arguments": arguments}).to_string();
        let text = self.call(&["qemu-monitor-command", &self.domain, &line])?;
        let mut answer: Value =
            serde_json::from_str(&text).map_err(|e| MonitorError::Transport(e.to_string()))?;
        match answer["error"]["desc"].as_str() {
            Some(reason) => Err(MonitorError::Refused { command: command.into(), reason: reason.into() }),
            None => Ok(answer["return"].take()),
        }
    }

    fn wait(&mut self, longest: Duration) -> Result<(), MonitorError> {
        // libvirt keeps QEMU's events to itself, and each look is a process: not too often.
        std::thread::sleep(longest.max(Duration::from_millis(250)));
        Ok(())
    }
}

/// Reads the layout of the only, or the named, virtio-mem device of a running VM: its id and how it can grow.
pub fn running_layout(
    monitor: &mut dyn Monitor,
    wanted: Option<&str>,
) -> Result<(String, Layout), MonitorError> {
    let refused = |reason: String| MonitorError::Refused { command: "query-memory-devices".into(), reason };
    let devices = monitor.execute("query-memory-devices", json!({}))?;
    let memory: Vec<&Value> =
        devices.as_array().into_iter().flatten().filter(|d| d["type"] == "virtio-mem").collect();
    let named = |d: &&&Value| wanted.is_none_or(|id| d["data"]["id"] == id);
    let mut matching = memory.iter().filter(named);
    let (Some(device), None) = (matching.next(), matching.next()) else {
        let ids: Vec<String> = memory.iter().map(|d| d["data"]["id"].to_string()).collect();
        return Err(refused(format!(
            "name one of its virtio-mem devices (--device), it has: {}",
            ids.join(" ")
        )));
    };
    let summary = monitor.execute("query-memory-size-summary", json!({}))?;
    let number = |v: &Value| v.as_u64().ok_or_else(|| refused(format!("unexpected answer {v}")));
    let (grown, block) = (number(&device["data"]["max-size"])?, number(&device["data"]["block-size"])?);
    let id = device["data"]["id"].as_str().ok_or_else(|| refused("the device has no id".into()))?;
    let boot = number(&summary["base-memory"])?;
    Ok((id.into(), Layout { boot, grown, block, step: step(boot, grown, block) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{DEFAULT_DMA_ENTRIES, GIB, Wish};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_xml_says_all_the_sizes_in_kib() {
        let layout = Wish { total: 4 * GIB, boot: None, dma_entries: DEFAULT_DMA_ENTRIES }.layout().unwrap();
        let xml = xml(&layout);
        assert!(xml.contains("<maxMemory slots='16' unit='KiB'>4194304</maxMemory>"), "{xml}");
        assert!(
            xml.contains("<size unit='KiB'>3670016</size>")
                && xml.contains("<block unit='KiB'>16384</block>"),
            "{xml}"
        );
    }

    #[test]
    fn answers_and_errors_come_through_virsh() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("virsh");
        let script = "#!/bin/sh\ncase \"$3\" in\n\
            *query-memory-devices*) echo '{\"return\": [{\"type\": \"virtio-mem\", \"data\": {\"id\": \"m\", \"max-size\": 1073741824, \"block-size\": 16777216}}]}';;\n\
            *summary*) echo '{\"return\": {\"base-memory\": 536870912}}';;\n\
            *qom-set*) echo '{\"error\": {\"desc\": \"busy\"}}';;\n\
            *) echo 'no domain' >&2; exit 1;;\nesac\n";
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut virsh = Virsh { domain: "d".into(), program: program.to_str().unwrap().into() };
        let (id, layout) = running_layout(&mut virsh, None).unwrap();
        assert_eq!((id.as_str(), layout.boot, layout.grown), ("m", GIB / 2, GIB));
        assert!(running_layout(&mut virsh, Some("other")).unwrap_err().to_string().contains("\"m\""));
        assert_eq!(
            crate::monitor::request(&mut virsh, "m", 1).unwrap_err().to_string(),
            "QEMU refused qom-set: busy"
        );
        assert!(virsh.execute("x", json!({})).unwrap_err().to_string().contains("no domain"));
    }
}
