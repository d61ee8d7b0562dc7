// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accelerators as the compose file has them: which API a server offers, and what a VM's processes may use of it: memory and objects
//! together, the rest each.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::Deserializer;
use serde::{Deserialize, Serialize};
use tombolo_calls::zone::{Area, CHANNELS_MAX};

use super::check::{Fault, bad_name};
use super::{Compose, Ready, Size, nearest};

/// Processes of a VM at once, where nothing is said.
const CHANNELS: u32 = 8;
/// Window of each process, where nothing is said.
const WINDOW: Size = Size(256 << 20);
/// Windows are multiples of this many bytes.
const WINDOW_ALIGN: u64 = 1 << 20;
/// The largest zone of a VM, in bytes: the guest keeps 1/64 of its size in tables.
const ZONE_MAX: u64 = 64 << 30;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Api {
    #[default]
    OpenCl,
    Cuda,
}

impl Api {
    /// Its name in the compose file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Api::OpenCl => "opencl",
            Api::Cuda => "cuda",
        }
    }

    /// The client library that programs in a VM load.
    #[must_use]
    pub fn library(self) -> &'static str {
        match self {
            Api::OpenCl => "libtombolo-opencl.so",
            Api::Cuda => "libcuda.so.1 of Tombolo",
        }
    }
}

/// `[accel.NAME]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccelSpec {
    /// `"opencl"`: What programs speak, `"opencl"` or `"cuda"`: whose devices the host must have, and which client library the VMs need.
    pub api: Api,
    /// `none`: The VM of this file that has the devices and serves the others. Default: the host serves.
    pub vm: Option<String>,
    /// `none`: Device memory of a VM's processes together.
    pub memory: Option<Size>,
    /// `none`: Objects of a VM's processes together.
    pub objects: Option<u32>,
    /// `0`: Requests of a VM's processes together per second; 0: no limit.
    pub rate: Option<u32>,
    /// `"256M"`: Memory shared with each process for bulk data, a multiple of 1M.
    pub window: Option<Size>,
    /// `100`: Share of processor time of a VM beside others, 1 to 100.
    pub weight: Option<u32>,
    /// `8`: Processes of a VM at once.
    pub channels: Option<u32>,
    /// `none`: As of a network.
    pub metrics: Option<tombolo_metrics::Place>,
    /// `false`: Kernels of VMs may do all that the server's user may.
    pub unconfined: bool,
    /// `one that is found`: The folder of the control group that the server divides between VMs, with no process in it.
    pub cgroup: Option<PathBuf>,
}

/// A VM's use of an accelerator: where something is said here, it is not as the accelerator says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccelUse {
    /// `as [accel.NAME]`: Device memory of its processes together.
    pub memory: Option<Size>,
    /// `as [accel.NAME]`: Objects of its processes together.
    pub objects: Option<u32>,
    /// `as [accel.NAME]`: Requests of its processes together per second.
    pub rate: Option<u32>,
    /// `as [accel.NAME]`: Memory shared with each process.
    pub window: Option<Size>,
    /// `as [accel.NAME]`: Share of processor time.
    pub weight: Option<u32>,
    /// `as [accel.NAME]`: Processes at once.
    pub channels: Option<u32>,
}

/// The accelerators of one VM: written as a table, or as a list of names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Uses(pub BTreeMap<String, AccelUse>);

impl<'de> Deserialize<'de> for Uses {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        crate::compose::named::deserialize(d, "accelerator", "cl = { weight = 25 }").map(Uses)
    }
}

impl AccelUse {
    /// The settings of one VM: its own, and those of `spec` for the rest.
    #[must_use]
    pub fn of(&self, spec: &AccelSpec) -> AccelUse {
        AccelUse {
            memory: self.memory.or(spec.memory),
            objects: self.objects.or(spec.objects),
            rate: self.rate.or(spec.rate),
            window: self.window.or(spec.window),
            weight: self.weight.or(spec.weight),
            channels: self.channels.or(spec.channels),
        }
    }

    /// Channels and the window of each, in bytes.
    #[must_use]
    pub fn geometry(&self) -> (u32, u64) {
        (self.channels.unwrap_or(CHANNELS), self.window.unwrap_or(WINDOW).0)
    }

    /// Bytes of the VM's zone.
    #[must_use]
    pub fn zone_bytes(&self) -> u64 {
        let (channels, window) = self.geometry();
        Area::zone_bytes(channels, window)
    }

    /// The key of a wrong setting, and the message about it, which follows the table's name.
    fn wrong(&self) -> Option<(&'static str, String)> {
        if self.weight.is_some_and(|w| w == 0 || w > 100) {
            return Some(("weight", "write 1 to 100".into()));
        }
        if self.channels.is_some_and(|c| c == 0 || c > CHANNELS_MAX) {
            return Some(("channels", format!("write 1 to {CHANNELS_MAX}")));
        }
        if self.objects == Some(0) {
            return Some(("objects", "write 1 or more".into()));
        }
        let (channels, window) = self.geometry();
        if window == 0 || window % WINDOW_ALIGN != 0 || window > ZONE_MAX {
            let better = Size(window.clamp(1, ZONE_MAX / 2).next_multiple_of(WINDOW_ALIGN));
            return Some(("window", format!("it must be a multiple of 1M, up to 32G; write \"{better}\"")));
        }
        if self.zone_bytes() > ZONE_MAX {
            let together = format!("{channels} channels with {} each are more than 64G", Size(window));
            return Some(("window", format!("{together}; write less, or fewer channels")));
        }
        None
    }
}

/// Checks the VM that an accelerator names as its owner.
fn check_owner(compose: &Compose, name: &str, spec: &AccelSpec) -> Result<(), Fault> {
    let Some(owner) = &spec.vm else { return Ok(()) };
    let fail = |key: &str, message: String| {
        Err((format!("accel.{name}"), key.to_owned(), format!("accel.{name}.{key}: {message}")))
    };
    let Some(vm) = compose.vm.get(owner) else {
        let hint = match nearest(owner, compose.vm.keys().map(String::as_str)) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("add [vm.{owner}]"),
        };
        return fail("vm", format!("the VM '{owner}' is not declared; {hint}"));
    };
    if vm.accelerators.0.contains_key(name) {
        let message = format!(
            "the VM '{owner}' has the devices itself; take '{name}' out of vm.{owner}.accelerators, or name another VM here"
        );
        return fail("vm", message);
    }
    let twin = compose.accel.iter().find(|(other, s)| *other != name && s.vm.as_ref() == Some(owner));
    if let Some((other, _)) = twin {
        let message = format!(
            "the VM '{owner}' owns accel.{other} already; a VM owns one accelerator, with all of its devices"
        );
        return fail("vm", message);
    }
    if vm.ready != Ready::Agent {
        let message =
            format!("its server is started by the VM's agent; write ready = \"agent\" in [vm.{owner}]");
        return fail("vm", message);
    }
    if spec.metrics.is_some() {
        let message = "the figures of a VM's server are those of 'tombolo accel ls --json'; leave it out";
        return fail("metrics", message.to_owned());
    }
    Ok(())
}

/// Checks what needs nothing from the host.
pub(super) fn check(compose: &Compose) -> Result<(), Fault> {
    let general = AccelUse::default();
    for (name, spec) in &compose.accel {
        let table = format!("accel.{name}");
        if let Some(message) = bad_name("an accelerator", name) {
            return Err((table, String::new(), message));
        }
        if let Some(relative) = spec.cgroup.as_ref().filter(|folder| !folder.is_absolute()) {
            let write = "write the folder's whole path, such as \"/sys/fs/cgroup/accel\"";
            let message =
                format!("accel.{name}.cgroup: '{}' is no absolute path; {write}", relative.display());
            return Err((table, "cgroup".into(), message));
        }
        if let Some((key, message)) = general.of(spec).wrong() {
            let message = format!("accel.{name}.{key}: {message}");
            return Err((table, key.into(), message));
        }
        check_owner(compose, name, spec)?;
    }
    for (name, vm) in &compose.vm {
        let fail = |message: String| Err((format!("vm.{name}"), "accelerators".to_owned(), message));
        for (accel, used) in &vm.accelerators.0 {
            let Some(spec) = compose.accel.get(accel) else {
                let hint = match nearest(accel, compose.accel.keys().map(String::as_str)) {
                    Some(near) => format!("did you mean '{near}'?"),
                    None => format!("add [accel.{accel}]"),
                };
                return fail(format!(
                    "vm.{name}.accelerators names the accelerator '{accel}', which is not declared; {hint}"
                ));
            };
            if let Some((key, message)) = used.of(spec).wrong() {
                return fail(format!("vm.{name}.accelerators.{accel}.{key}: {message}"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compose::Project;
    use std::path::Path;

    fn parse(text: &str) -> Result<Project, String> {
        Project::parse(Path::new("/somewhere/demo/tombolo.toml"), text).map_err(|e| e.to_string())
    }

    fn error(text: &str) -> String {
        parse(text).expect_err("must be refused")
    }

    #[test]
    fn a_vm_has_what_its_accelerator_says_unless_it_says_otherwise() {
        let text = "[accel.cl]\nmemory = \"512M\"\nweight = 50\ncgroup = \"/sys/fs/cgroup/accel\"\n[vm.a]\naccelerators = [\"cl\"]\n\
                    [vm.b]\naccelerators = { cl = { weight = 25, window = \"32M\", channels = 2 } }\n";
        let project = parse(text).unwrap();
        let spec = &project.compose.accel["cl"];
        assert_eq!(spec.api, Api::OpenCl);
        let of = |vm: &str| project.compose.vm[vm].accelerators.0["cl"].of(spec);
        let (a, b) = (of("a"), of("b"));
        assert_eq!((a.memory, a.weight, a.geometry()), (Some(Size(512 << 20)), Some(50), (8, 256 << 20)));
        assert_eq!((b.memory, b.weight, b.geometry()), (Some(Size(512 << 20)), Some(25), (2, 32 << 20)));
        assert!(a.zone_bytes() > 2 << 30 && a.zone_bytes() < 3 << 30 && a.zone_bytes() % (2 << 20) == 0);
        let json = serde_json::to_string(&project).unwrap();
        assert_eq!(serde_json::from_str::<Project>(&json).unwrap(), project);
    }

    #[test]
    fn what_is_wrong_is_named_with_line_and_remedy() {
        let e = error("[accel.cl]\n[vm.a]\naccelerators = [\"lc\"]\n");
        assert!(e.contains(":3: ") && e.ends_with("did you mean 'cl'?"), "{e}");
        let e = error("[vm.a]\naccelerators = [\"gpu\"]\n");
        assert!(e.ends_with("add [accel.gpu]"), "{e}");
        let e = error("[accel.cl]\nweihgt = 3\n");
        assert!(e.contains(":2: unknown key 'weihgt'") && e.ends_with("did you mean 'weight'?"), "{e}");
        let e = error("[accel.cl]\napi = \"vulkan\"\n");
        assert!(e.contains(":2: ") && e.contains("cuda") && e.contains("opencl"), "{e}");
        let e = error("[accel.cl]\ncgroup = \"accel\"\n");
        assert!(e.contains(":2: accel.cl.cgroup: 'accel' is no absolute path"), "{e}");
        let e = error("[accel.cl]\nweight = 101\n");
        assert!(e.contains(":2: accel.cl.weight: write 1 to 100"), "{e}");
        let e = error("[accel.cl]\n[vm.a]\naccelerators = { cl = { window = \"100K\" } }\n");
        assert!(e.contains(":3: vm.a.accelerators.cl.window") && e.ends_with("write \"1M\""), "{e}");
        let e = error("[accel.cl]\nwindow = \"4G\"\nchannels = 64\n");
        assert!(e.contains(":2: ") && e.contains("more than 64G"), "{e}");
        let e = error("[accel.cl]\n[vm.a]\naccelerators = [\"cl\", \"cl\"]\n");
        assert!(e.contains("the accelerator 'cl' is named twice"), "{e}");
        let e = error("[accel.\"a b\"]\n");
        assert!(e.contains(": 'a b' can't name an accelerator"), "{e}");
    }
    #[test]
    fn a_vm_owns_an_accelerator_that_others_use() {
        let vms = "[vm.owner]\n[vm.a]\naccelerators = [\"gpu\"]\n";
        let project = parse(&format!("[accel.gpu]\nvm = \"owner\"\nmemory = \"1G\"\n{vms}")).unwrap();
        assert_eq!(project.compose.accel["gpu"].vm.as_deref(), Some("owner"));
        let json = serde_json::to_string(&project).unwrap();
        assert_eq!(serde_json::from_str::<Project>(&json).unwrap(), project);
    }

    #[test]
    fn an_owner_that_can_not_be_is_named_with_line_and_remedy() {
        let vms = "[vm.owner]\n[vm.a]\naccelerators = [\"gpu\"]\n";
        let e = error(&format!("[accel.gpu]\nvm = \"onwer\"\n{vms}"));
        assert!(e.contains(":2: accel.gpu.vm: ") && e.ends_with("did you mean 'owner'?"), "{e}");
        let e = error(&format!("[accel.gpu]\nvm = \"service\"\n{vms}"));
        assert!(e.ends_with("add [vm.service]"), "{e}");
        let e = error(&format!("[accel.gpu]\nvm = \"a\"\n{vms}"));
        assert!(e.contains(":2: ") && e.contains("take 'gpu' out of vm.a.accelerators"), "{e}");
        let e = error(&format!("[accel.cl]\nvm = \"owner\"\n[accel.gpu]\nvm = \"owner\"\n{vms}"));
        assert!(e.contains("accel.cl.vm: the VM 'owner' owns accel.gpu already"), "{e}");
        let e = error("[accel.gpu]\nvm = \"owner\"\n[vm.owner]\nready = \"running\"\n");
        assert!(e.contains(":2: ") && e.contains("ready = \"agent\" in [vm.owner]"), "{e}");
        let e = error(&format!("[accel.gpu]\nvm = \"owner\"\nmetrics = \"127.0.0.1:9128\"\n{vms}"));
        assert!(e.contains(":3: accel.gpu.metrics: ") && e.contains("tombolo accel ls"), "{e}");
    }
}
