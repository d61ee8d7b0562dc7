// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `tombolo files import` can unpack: tar archives, and images in the layout of the Open Container Initiative (image-spec, image-layout.md).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Deserialize;

/// The most bytes of an index or a manifest that are read.
const MAX_JSON: u64 = 4 << 20;
/// The most indexes below each other.
const MAX_DEPTH: u32 = 4;

/// A source that is not a plain folder.
#[derive(Debug)]
pub(in crate::cli) enum Source {
    Tar(PathBuf),
    /// The layers of an image, the lowest first.
    Layers(Vec<PathBuf>),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// An index or a manifest.
#[derive(Debug, Deserialize)]
struct Document {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

/// Finds out what a path is. `None`: a folder that is to be copied as it is.
pub(in crate::cli) fn source(path: &Path) -> anyhow::Result<Option<Source>> {
    let about = path.metadata().with_context(|| path.display().to_string())?;
    if about.is_dir() {
        if !path.join("oci-layout").exists() || !path.join("index.json").exists() {
            return Ok(None);
        }
        return Ok(Some(Source::Layers(layers(path).with_context(|| path.display().to_string())?)));
    }
    let mut begin = [0; 4096];
    let mut length = 0;
    let mut file = plain(path)?;
    while length < begin.len() {
        match file.read(&mut begin[length..])? {
            0 => break,
            n => length += n,
        }
    }
    let begin = &begin[..length];
    if begin.get(257..262) != Some(b"ustar") {
        bail!("{}: {}", path.display(), no_archive(begin));
    }
    if begin.starts_with(b"oci-layout\0")
        || begin.starts_with(b"blobs/")
        || begin.starts_with(b"manifest.json\0")
    {
        let (at, tar) = (path.display(), path.display());
        bail!(
            "{at}: the archive of an image: unpack it, and import the folder: mkdir image && tar -C image -xf {tar}"
        );
    }
    Ok(Some(Source::Tar(path.to_owned())))
}

/// Says what a file is that is no archive, and what to do.
fn no_archive(begin: &[u8]) -> &'static str {
    let at = |offset, magic: &[u8]| begin.get(offset..offset + magic.len()) == Some(magic);
    let is_disk = at(0, b"QFI\xfb")
        || at(510, b"\x55\xaa")
        || at(0x438, b"\x53\xef")
        || at(0, b"hsqs")
        || at(0, b"XFSB");
    match () {
        () if is_disk => {
            "a disk image, which is not unpacked: mount it read-only (a raw one: mount -o ro,loop; others: guestmount --ro -i) and import the directory"
        }
        () if at(0, b"\xfd7zXZ") => "compressed by xz: decompress it first (unxz)",
        () if at(0, b"BZh") => "compressed by bzip2: decompress it first (bunzip2)",
        () => "neither a directory nor a tar archive (plain, gzip or zstd)",
    }
}

/// Opens a file, decompressed.
pub(in crate::cli) fn plain(path: &Path) -> anyhow::Result<Box<dyn Read>> {
    let mut file = BufReader::new(File::open(path).with_context(|| path.display().to_string())?);
    let begin = file.fill_buf().with_context(|| path.display().to_string())?;
    Ok(if begin.starts_with(b"\x1f\x8b") {
        Box::new(flate2::bufread::MultiGzDecoder::new(file))
    } else if begin.starts_with(b"\x28\xb5\x2f\xfd") {
        Box::new(zstd::Decoder::with_buffer(file)?)
    } else {
        Box::new(file)
    })
}

fn layers(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut document = read(&folder.join("index.json"))?;
    for _ in 0..MAX_DEPTH {
        if document.manifests.is_empty() {
            return document.layers.iter().map(|layer| blob(folder, layer)).collect();
        }
        document = read(&blob(folder, chosen(&document.manifests)?)?)?;
    }
    bail!("indexes of indexes, more than {MAX_DEPTH}")
}

fn read(path: &Path) -> anyhow::Result<Document> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    serde_json::from_reader(BufReader::new(file.take(MAX_JSON))).with_context(|| path.display().to_string())
}

/// Returns the image for this machine's processors.
fn chosen(manifests: &[Descriptor]) -> anyhow::Result<&Descriptor> {
    let own = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let fits = |d: &&Descriptor| d.platform.as_ref().is_none_or(|p| p.architecture == own && p.os == "linux");
    let fitting: Vec<_> = manifests.iter().filter(fits).collect();
    match fitting[..] {
        [one] => Ok(one),
        [] => bail!("no image for linux/{own} is in it"),
        _ => bail!(
            "{} images for linux/{own} are in it: copy one of them out (skopeo copy oci:FOLDER:TAG oci:OTHER)",
            fitting.len()
        ),
    }
}

/// Returns the file of a blob that is whole by its size.
fn blob(folder: &Path, descriptor: &Descriptor) -> anyhow::Result<PathBuf> {
    let Descriptor { media_type, digest, size, .. } = descriptor;
    let is_hash = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_alphanumeric());
    let Some((algorithm, hash)) = digest.split_once(':').filter(|(a, h)| is_hash(a) && is_hash(h)) else {
        bail!("the digest {digest:?} is none");
    };
    if media_type.ends_with("+encrypted") {
        bail!("{digest} is encrypted: decrypt the image first (skopeo copy --decryption-key)");
    }
    let path = folder.join("blobs").join(algorithm).join(hash);
    let length = path.metadata().with_context(|| path.display().to_string())?.len();
    if length != *size {
        bail!("{} has {length} bytes of {size}: copy the image anew", path.display());
    }
    Ok(path)
}
