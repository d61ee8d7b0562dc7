// SPDX-License-Identifier: Apache-2.0 OR MIT
//! cuLink: PTX texts and fat binaries become one image. The image is a list of texts in a format of this device's own, which cuModuleLoadData takes as it
//! takes NVIDIA's: no machine code exists that could be made of them.

use super::module::Logs;
use super::registry::Registry;
use super::{
    Code, FILE_NOT_FOUND, Handle, INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, NO_BINARY_FOR_GPU, Result, lock,
};
use crate::image::{self, Refused};
use std::sync::{Arc, Mutex};

pub struct Link {
    logs: Logs,
    texts: Mutex<Vec<String>>,
    /// What cuLinkComplete made: lives until the link is destroyed.
    image: Mutex<Vec<u8>>,
}

pub static LINKS: Registry<Link> = Registry::new(INVALID_HANDLE);

/// CUjitInputType.
const CUBIN: u32 = 0;

pub fn create(logs: Logs) -> Result<Handle> {
    super::context::current()?;
    Ok(LINKS.insert(Arc::new(Link { logs, texts: Mutex::default(), image: Mutex::default() })))
}

fn refuse(logs: Logs, code: Code, what: &str) -> Code {
    Logs::write(logs.error, what);
    code
}

/// Adds an input. The text's syntax is checked here, so that the log names what is wrong with it.
pub fn add(handle: Handle, kind: u32, bytes: &[u8]) -> Result {
    let link = LINKS.get(handle)?;
    if kind == CUBIN {
        return Err(refuse(
            link.logs,
            NO_BINARY_FOR_GPU,
            "machine code can't be linked for this device: give it PTX",
        ));
    }
    let mut ended = bytes.to_vec();
    ended.push(0);
    // SAFETY: a text with its end; a fat binary's sizes are as its writer says.
    let texts = unsafe { image::texts(ended.as_ptr()) }.map_err(|refused| match refused {
        Refused::NoBinary => refuse(link.logs, NO_BINARY_FOR_GPU, "no PTX in the image"),
        Refused::Invalid(what) => refuse(link.logs, INVALID_VALUE, &what),
    })?;
    for text in &texts {
        crate::ptx::parse(text)
            .map_err(|error| refuse(link.logs, INVALID_PTX, &format!("ptxas error: {error}\n")))?;
    }
    lock(&link.texts).extend(texts);
    Ok(())
}

pub fn add_file(handle: Handle, kind: u32, path: &str) -> Result {
    add(handle, kind, &std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?)
}

/// Address and size of the image.
pub fn complete(handle: Handle) -> Result<(usize, usize)> {
    let link = LINKS.get(handle)?;
    Logs::write(link.logs.info, "");
    let mut made = lock(&link.image);
    *made = image::join(&lock(&link.texts));
    Ok((made.as_ptr() as usize, made.len()))
}
