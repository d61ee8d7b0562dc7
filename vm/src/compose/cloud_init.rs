// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cloud_init =`: what cloud-init in a user's own image is given at its start.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Size;
use crate::host;

/// Data for cloud-init. Each text is the path of a file, or the text itself if it has several lines or begins with '#'.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CloudInit {
    /// `none`: #cloud-config, a script, or whatever else cloud-init takes.
    pub user_data: Option<String>,
    /// `made from its networks`: The network configuration.
    pub network: Option<String>,
    /// `[]`: Public keys of the image's default user, or paths of files with them.
    pub ssh_keys: Vec<String>,
    /// `the VM's name`: The guest's name.
    pub hostname: Option<String>,
    /// `made of the file's path and the VM's name`: What cloud-init takes for the same machine.
    pub instance_id: Option<String>,
}

/// The most bytes of a file that cloud-init is given.
const MOST: u64 = 8 << 20;

/// A text that is in the compose file, or in a file of its own.
#[derive(Debug, PartialEq, Eq)]
pub enum Source<'a> {
    /// The text itself.
    Inline(&'a str),
    /// The path of a file with the text.
    File(&'a Path),
}

/// Tells a path from a text.
#[must_use]
pub fn source(text: &str) -> Source<'_> {
    if text.contains('\n') || text.starts_with('#') {
        Source::Inline(text)
    } else {
        Source::File(Path::new(text))
    }
}

/// Tells a path from an SSH key, which has a kind and base64.
#[must_use]
pub fn key_source(text: &str) -> Source<'_> {
    let kinds = ["ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-"];
    if text.contains(' ') && kinds.iter().any(|kind| text.starts_with(kind)) {
        Source::Inline(text)
    } else {
        Source::File(Path::new(text))
    }
}

impl CloudInit {
    /// Makes paths absolute that are relative to the folder of the compose file, or to the user's.
    pub(super) fn make_absolute(&mut self, dir: &Path) {
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let absolute = |text: &mut String| {
            let path = match (text.strip_prefix("~/"), &home) {
                (Some(rest), Some(home)) => home.join(rest),
                _ => dir.join(&*text),
            };
            *text = path.to_string_lossy().into_owned();
        };
        for text in [&mut self.user_data, &mut self.network].into_iter().flatten() {
            if let Source::File(_) = source(text) {
                absolute(text);
            }
        }
        for text in &mut self.ssh_keys {
            if let Source::File(_) = key_source(text) {
                absolute(text);
            }
        }
    }

    /// The bytes of user-data, where there is any: a text, or one that is compressed.
    ///
    /// # Errors
    /// Names the key and the file.
    pub fn read_user_data(&self) -> anyhow::Result<Option<Vec<u8>>> {
        self.user_data.as_deref().map(|text| read("user_data", source(text))).transpose()
    }

    /// The text of the network configuration, where the compose file has one.
    ///
    /// # Errors
    /// Names the key and the file.
    pub fn read_network(&self) -> anyhow::Result<Option<Vec<u8>>> {
        self.network.as_deref().map(|text| read("network", source(text))).transpose()
    }

    /// The SSH keys, one in each string.
    ///
    /// # Errors
    /// Names the key and the file, and a file without a public key in it.
    pub fn read_keys(&self) -> anyhow::Result<Vec<String>> {
        let mut keys = Vec::new();
        for entry in &self.ssh_keys {
            let text = read("ssh_keys", key_source(entry))?;
            let text = String::from_utf8_lossy(&text);
            let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
            let before = keys.len();
            for line in lines {
                anyhow::ensure!(
                    key_source(line) == Source::Inline(line),
                    "cloud_init.ssh_keys: {entry} is no public key; name the file that ends in .pub"
                );
                keys.push(line.to_owned());
            }
            anyhow::ensure!(keys.len() > before, "cloud_init.ssh_keys: {entry} has no key in it");
        }
        Ok(keys)
    }
}

fn read(key: &str, source: Source<'_>) -> anyhow::Result<Vec<u8>> {
    match source {
        Source::Inline(text) => Ok(text.as_bytes().to_vec()),
        Source::File(path) => read_file(path)
            .map_err(|e| anyhow::anyhow!("cloud_init.{key}: {} can't be read: {e}", path.display())),
    }
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    host::open(path, host::Kind::File, false)?.take(MOST + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MOST {
        return Err(io::Error::other(format!("it has more than {}", Size(MOST))));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_itself_or_in_a_file_beside_the_compose_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("user.yaml"), "#cloud-config\n").unwrap();
        std::fs::write(dir.path().join("id.pub"), "# mine\nssh-ed25519 AAAA me@here\n").unwrap();
        let mut given: CloudInit = toml::from_str(
            "user_data = \"user.yaml\"\nnetwork = \"version: 2\\n\"\nssh_keys = [\"id.pub\", \"ssh-rsa BBBB\"]",
        )
        .unwrap();
        given.make_absolute(dir.path());
        assert_eq!(given.read_user_data().unwrap().unwrap(), b"#cloud-config\n");
        assert_eq!(given.read_network().unwrap().unwrap(), b"version: 2\n");
        assert_eq!(given.read_keys().unwrap(), ["ssh-ed25519 AAAA me@here", "ssh-rsa BBBB"]);
    }

    #[test]
    fn what_can_not_be_read_is_named_with_its_key() {
        let mut given: CloudInit = toml::from_str("user_data = \"none.yaml\"\nssh_keys = [\"id\"]").unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("id"), "-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap();
        given.make_absolute(dir.path());
        let e = given.read_user_data().unwrap_err().to_string();
        assert!(e.starts_with("cloud_init.user_data: ") && e.contains("none.yaml can't be read"), "{e}");
        let e = given.read_keys().unwrap_err().to_string();
        assert!(e.contains("is no public key; name the file that ends in .pub"), "{e}");
    }

    #[test]
    fn compressed_user_data_stays_as_it_is_and_what_has_no_end_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let compressed = [0x1f, 0x8b, 8, 0, 0xff];
        std::fs::write(dir.path().join("user.gz"), compressed).unwrap();
        let long = std::fs::File::create(dir.path().join("long")).unwrap();
        long.set_len(MOST + 1).unwrap();
        let read = |text: &str| {
            let mut given: CloudInit = toml::from_str(&format!("user_data = \"{text}\"")).unwrap();
            given.make_absolute(dir.path());
            given.read_user_data().map(Option::unwrap).map_err(|e| e.to_string())
        };
        assert_eq!(read("user.gz").unwrap(), compressed);
        assert!(read("long").unwrap_err().ends_with("it has more than 8M"));
        assert!(read("/dev/zero").unwrap_err().ends_with("it is no regular file"));
        assert!(read(".").unwrap_err().ends_with("it is no regular file"));
    }
}
