// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A loaded module: its variables have addresses and their first values, its functions have numbers.

use super::space::{Arena, CODE_WINDOW};
use crate::ptx::Error;
use crate::ptx::ast::{Init, Module, Space, Variable};
use std::collections::HashMap;

pub struct Loaded {
    pub ast: Module,
    /// Address and size of each variable in global or constant memory.
    pub globals: HashMap<String, (u64, usize)>,
    /// Numbers of functions that have bodies, and of those that are declared only.
    pub functions: HashMap<String, usize>,
}

/// The address of the module's function with this number.
pub fn code_address(number: usize) -> u64 {
    CODE_WINDOW + 16 * number as u64
}

impl Loaded {
    pub fn new(ast: Module, arena: &Arena) -> Result<Loaded, Error> {
        let mut functions: HashMap<String, usize> = HashMap::new();
        for (number, function) in ast.functions.iter().enumerate() {
            // A declaration does not hide the function.
            if function.body.is_some() || !functions.contains_key(&function.name) {
                functions.insert(function.name.clone(), number);
            }
        }
        for (alias, name) in &ast.aliases {
            if let Some(&number) = functions.get(name) {
                functions.insert(alias.clone(), number);
            }
        }
        let mut loaded = Loaded { ast, globals: HashMap::new(), functions };
        let fail = |what: String| Error { line: 0, what };
        for variable in &loaded.ast.variables {
            if matches!(variable.space, Space::Global | Space::Const)
                && !(variable.external && loaded.globals.contains_key(&variable.name))
            {
                let address = arena
                    .allocate(variable.size, variable.align)
                    .ok_or_else(|| fail(format!("no memory for {}", variable.name)))?;
                loaded.globals.insert(variable.name.clone(), (address, variable.size));
            }
        }
        for variable in &loaded.ast.variables {
            if let (false, Some(&(address, size))) =
                (variable.init.is_empty(), loaded.globals.get(&variable.name))
            {
                let bytes = loaded.bytes(variable).map_err(fail)?;
                // SAFETY: the variable's memory was just allocated, and no kernel of the module runs yet.
                unsafe {
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len().min(size))
                };
            }
        }
        Ok(loaded)
    }

    /// The variable's first value.
    fn bytes(&self, variable: &Variable) -> Result<Vec<u8>, String> {
        let mut out = Vec::with_capacity(variable.size);
        for init in &variable.init {
            let (value, mask) = match init {
                Init::Bits(bits) => (*bits, None),
                Init::Symbol { name, offset, mask, .. } => {
                    let address = self.address(name).ok_or_else(|| {
                        format!("{} is initialized with {name}, which does not exist", variable.name)
                    })?;
                    (address.wrapping_add_signed(*offset), *mask)
                }
            };
            // 0xff00(name) is the second byte of the address.
            let value = mask
                .map_or(value, |mask| if mask == 0 { 0 } else { (value & mask) >> mask.trailing_zeros() });
            out.extend_from_slice(&value.to_le_bytes()[..variable.element.min(8)]);
        }
        Ok(out)
    }

    /// Of a variable or function.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.globals
            .get(name)
            .map(|&(address, _)| address)
            .or_else(|| self.functions.get(name).map(|&number| code_address(number)))
    }

    pub fn release(&self, arena: &Arena) {
        for &(address, _) in self.globals.values() {
            arena.release(address);
        }
    }
}
