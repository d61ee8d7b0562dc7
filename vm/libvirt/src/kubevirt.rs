// SPDX-License-Identifier: Apache-2.0 OR MIT
//! KubeVirt's hook sidecar: it is called with a VirtualMachineInstance as JSON and with the domain's XML, and prints the XML that the domain
//! shall have. Zones come from the annotation [`ANNOTATION`].

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use crate::domain::Domain;
use crate::want::{Want, ZoneWant};

/// Names zones: a JSON list of objects with `path` (in the launcher's pod) and, if wanted, `rights` ("ro").
pub const ANNOTATION: &str = "tombolo.io/zones";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Zone {
    path: std::path::PathBuf,
    #[serde(default)]
    rights: Rights,
}

#[derive(Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Rights {
    #[default]
    Rw,
    Ro,
}

/// The domain's XML with the zones that the instance asks for.
///
/// # Errors
/// Malformed input, or a zone whose file is not in the pod.
pub fn define(instance: &str, xml: &str) -> anyhow::Result<String> {
    let instance: Value =
        serde_json::from_str(instance).context("the VirtualMachineInstance is malformed JSON")?;
    let metadata = &instance["metadata"];
    let Some(zones) = metadata["annotations"][ANNOTATION].as_str() else { return Ok(xml.to_owned()) };
    let zones: Vec<Zone> = serde_json::from_str(zones).with_context(|| {
        format!(
            "the annotation {ANNOTATION} is malformed; write for example [{{\"path\": \"/zones/own.zone\"}}]"
        )
    })?;
    let name = |field: &str| {
        metadata[field]
            .as_str()
            .with_context(|| format!("the VirtualMachineInstance has no metadata.{field}"))
    };
    // A namespace holds no dot, so no two instances of a cluster share a name.
    let member = crate::cli::member_name(&format!("{}.{}", name("namespace")?, name("name")?));
    let mut domain = Domain::parse(xml)?;
    for zone in zones {
        let (path, read_only) = (zone.path, zone.rights == Rights::Ro);
        domain.attach(&Want::Zone(ZoneWant {
            path,
            member: member.clone(),
            read_only,
            mount: None,
            identity: None,
        }))?;
    }
    domain.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};
    use tombolo_zone::{Backing, ZoneConfig};

    const XML: &str = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>default_web</name>\
                       <memory unit='KiB'>1048576</memory><devices/></domain>";

    #[test]
    fn an_instance_without_the_annotation_keeps_its_xml() {
        assert_eq!(define(r#"{"metadata": {"name": "web"}}"#, XML).unwrap(), XML);
    }

    /// The file of a zone, made in `folder`.
    fn zone_in(folder: &Path) -> PathBuf {
        let path = folder.join("own.zone");
        let config = ZoneConfig::new("own", 16 << 20).backing(Backing::File(path.clone()));
        drop(tombolo_zone::Zone::create(&config).unwrap());
        path
    }

    #[test]
    fn an_annotated_instance_gets_its_zones_under_its_own_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = zone_in(dir.path());
        let list = serde_json::json!([{ "path": path, "rights": "rw" }]).to_string();
        let instance = serde_json::json!({ "metadata": { "name": "web", "namespace": "shop", "annotations": { ANNOTATION: list } } });
        let out = define(&instance.to_string(), XML).unwrap();
        assert!(
            out.contains("virtio-pmem") && out.contains("shop.web.sock") && out.contains("<maxMemory"),
            "{out}"
        );
    }

    #[test]
    fn instances_of_different_namespaces_are_different_members() {
        let dir = tempfile::tempdir().unwrap();
        let path = zone_in(dir.path());
        let list = serde_json::json!([{ "path": path }]).to_string();
        let of = |namespace: &str, name: &str| {
            let metadata = serde_json::json!({ "name": name, "namespace": namespace, "annotations": { ANNOTATION: list } });
            define(&serde_json::json!({ "metadata": metadata }).to_string(), XML)
        };
        assert_ne!(of("a-b", "c").unwrap(), of("a", "b-c").unwrap());
        let nameless = serde_json::json!({ "metadata": { "annotations": { ANNOTATION: list } } }).to_string();
        assert!(define(&nameless, XML).unwrap_err().to_string().contains("metadata.namespace"));
    }

    #[test]
    fn a_malformed_annotation_is_named_with_an_example() {
        let instance = serde_json::json!({ "metadata": { "annotations": { ANNOTATION: "own.zone" } } });
        let said = define(&instance.to_string(), XML).unwrap_err().to_string();
        assert!(said.contains(ANNOTATION) && said.contains("for example"), "{said}");
    }
}
