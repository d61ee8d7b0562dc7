// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Modules, libraries, functions and kernels. A kernel is decoded when it is first asked for anything; a library's kernel and the function that it stands for
//! are one object with one handle.

use super::registry::Registry;
use super::{
    Code, FILE_NOT_FOUND, Handle, INVALID_HANDLE, INVALID_IMAGE, INVALID_PTX, INVALID_VALUE,
    NO_BINARY_FOR_GPU, NOT_FOUND, Result, context, device, lock,
};
use crate::image::{self, Refused};
use crate::machine::decode::decode;
use crate::machine::link::Loaded;
use crate::machine::program::Program;
use crate::ptx;
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

pub struct Module {
    pub loaded: Loaded,
    functions: Mutex<HashMap<String, Handle>>,
}

pub struct Function {
    pub name: String,
    /// The name as C programs get it.
    pub c_name: std::ffi::CString,
    pub module: Arc<Module>,
    pub owner: Handle,
    program: OnceLock<std::result::Result<Arc<Program>, ptx::Error>>,
    /// Dynamic shared memory that the program has asked for.
    pub dynamic_shared: AtomicI32,
}

pub static MODULES: Registry<Module> = Registry::new(INVALID_HANDLE);
pub static FUNCTIONS: Registry<Function> = Registry::new(INVALID_HANDLE);

/// Where cuModuleLoadDataEx's options want the compiler's words.
#[derive(Default, Clone, Copy)]
pub struct Logs {
    pub info: (usize, usize),
    pub error: (usize, usize),
}

impl Logs {
    /// From the arrays of options and values. The values of sizes are numbers in the place of pointers.
    pub fn of(options: &[u32], values: &[usize]) -> Logs {
        let mut logs = Logs::default();
        for (&option, &value) in options.iter().zip(values) {
            match option {
                3 => logs.info.0 = value,
                4 => logs.info.1 = value as u32 as usize,
                5 => logs.error.0 = value,
                6 => logs.error.1 = value as u32 as usize,
                _ => {}
            }
        }
        logs
    }

    pub fn write((to, size): (usize, usize), text: &str) {
        if to == 0 || size == 0 {
            return;
        }
        let len = text.len().min(size - 1);
        // SAFETY: the API's caller gives a buffer of this size.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to as *mut u8, len);
            *(to as *mut u8).add(len) = 0;
        }
    }
}

/// # Safety
/// The image is one that `image::texts` takes.
pub unsafe fn load(image: *const u8, logs: Logs) -> Result<Handle> {
    context::current()?.healthy()?;
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let texts = unsafe { image::texts(image) }.map_err(|refused| {
        let (code, text): (Code, _) = match refused {
            Refused::NoBinary => (NO_BINARY_FOR_GPU, "no PTX for compute capability 9.0 or less in the image: compile with -gencode arch=compute_80,code=compute_80".to_owned()),
            Refused::Invalid(what) => (INVALID_IMAGE, what),
        };
        Logs::write(logs.error, &text);
        code
    })?;
    let loaded = parse(&texts).map_err(|error| {
        Logs::write(logs.error, &format!("ptxas error: {error}\n"));
        INVALID_PTX
    })?;
    Logs::write(logs.info, "");
    let module = Arc::new(Module { loaded, functions: Mutex::default() });
    Ok(MODULES.insert(module))
}

fn parse(texts: &[String]) -> std::result::Result<Loaded, ptx::Error> {
    let mut whole = ptx::ast::Module::default();
    for text in texts {
        let module = ptx::parse(text)?;
        whole.version = module.version;
        whole.target = module.target;
        whole.variables.extend(module.variables);
        whole.functions.extend(module.functions);
        whole.aliases.extend(module.aliases);
    }
    if whole.target.is_empty() {
        return Err(ptx::Error { line: 1, what: "no .target: is this PTX?".to_owned() });
    }
    let arena = device::arena().map_err(|_| ptx::Error { line: 0, what: "no memory".to_owned() })?;
    Loaded::new(whole, arena)
}

pub fn load_file(path: &str, logs: Logs) -> Result<Handle> {
    let mut bytes = std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
    bytes.push(0);
    // SAFETY: a text with its end; a fat binary's sizes are as its writer says.
    unsafe { load(bytes.as_ptr(), logs) }
}

pub fn unload(handle: Handle) -> Result {
    let context = context::current()?;
    let module = MODULES.get(handle)?;
    let healthy = context.synchronize();
    MODULES.remove(handle)?;
    for (_, function) in lock(&module.functions).drain() {
        // A program may have kept none of them.
        let _ = FUNCTIONS.remove(function);
    }
    module.loaded.release(device::arena()?);
    healthy
}

/// The handle of a kernel of a module.
pub fn function(owner: Handle, name: &str) -> Result<Handle> {
    let module = MODULES.get(owner)?;
    let mut functions = lock(&module.functions);
    if let Some(&handle) = functions.get(name) {
        return Ok(handle);
    }
    let entry =
        module.loaded.functions.get(name).is_some_and(|&number| module.loaded.ast.functions[number].entry);
    if !entry {
        return Err(NOT_FOUND);
    }
    let c_name = std::ffi::CString::new(name).map_err(|_| INVALID_VALUE)?;
    let function = Function {
        name: name.to_owned(),
        c_name,
        module: module.clone(),
        owner,
        program: OnceLock::new(),
        dynamic_shared: AtomicI32::new(0),
    };
    let handle = FUNCTIONS.insert(Arc::new(function));
    functions.insert(name.to_owned(), handle);
    Ok(handle)
}

/// Names of all kernels.
pub fn names(owner: Handle) -> Result<Vec<String>> {
    let module = MODULES.get(owner)?;
    Ok(module
        .loaded
        .ast
        .functions
        .iter()
        .filter(|function| function.entry && function.body.is_some())
        .map(|function| function.name.clone())
        .collect())
}

/// Address and size of a variable.
pub fn global(owner: Handle, name: &str) -> Result<(u64, usize)> {
    MODULES.get(owner)?.loaded.globals.get(name).copied().ok_or(NOT_FOUND)
}

impl Function {
    pub fn program(&self) -> Result<Arc<Program>> {
        let program = self.program.get_or_init(|| decode(&self.module.loaded, &self.name).map(Arc::new));
        program.as_ref().cloned().map_err(|error| {
            eprintln!("{}: {}: {error}", device::NAME, self.name);
            INVALID_PTX
        })
    }

    /// CUfunction_attribute by number.
    pub fn attribute(&self, number: i32) -> Result<i32> {
        let program = self.program()?;
        Ok(match number {
            0 => program.max_threads as i32,
            1 => program.shared_bytes as i32 - 1024,
            2 => 0,
            3 => program.local_bytes as i32,
            4 => 32,
            5 => (program.version.0 * 10 + program.version.1) as i32,
            6 => 90,
            7 => 0,
            8 => {
                self.dynamic_shared.load(Ordering::Relaxed).max(device::SHARED_PER_BLOCK - self.attribute(1)?)
            }
            9 => -1,
            10..=15 => 0,
            _ => return Err(INVALID_VALUE),
        })
    }

    pub fn set_attribute(&self, number: i32, value: i32) -> Result {
        match number {
            8 if (0..=device::SHARED_OPTIN - self.attribute(1)?).contains(&value) => {
                self.dynamic_shared.store(value, Ordering::Relaxed);
                Ok(())
            }
            // Advice.
            9 | 14 => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }
}
