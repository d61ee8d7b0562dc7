// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The declarations of an API as the generators see them.

use std::collections::HashSet;

/// A type of a parameter or of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Type {
    /// An integer, by its Rust name.
    Int(String),
    /// A handle; whether it may be null.
    Handle(String, bool),
    /// Several handles; the parameter that counts them.
    Handles(String, Option<String>),
    /// Ids that the client chose for handles to be created.
    New(String),
    Triple,
    /// Any number of integers.
    Ints(String),
    /// Bytes, whose length another parameter or a number gives.
    Bytes(String),
    Blob,
    /// A string; whether it may be null.
    Str(bool),
    Strs,
    /// A structure of the API, by its name; only on the wire.
    Struct(String),
    /// A flag: the call blocks until its command has ended.
    Blocking,
    /// The program's memory that a transfer reads or writes.
    Data,
    /// An origin or a pitch in the program's memory. The driver gets 0, as the bytes are packed in the window.
    Host(Box<Type>),
    /// An address of shared virtual memory, the parameter or number that gives its length, and whether it may be null.
    Shared(String, bool),
    /// A list of properties that ends with 0, and those that a client may set.
    Properties(Vec<String>),
    /// An address of device memory, which the server looks up among the client's allocations.
    Address,
    /// The number of a device, as the program counts those that it sees.
    Ordinal,
    /// A pointer to where the handle of a new object of this kind goes; in the record, the id that the client chose.
    Fresh(String),
    /// A pointer to where a result goes.
    Out(Box<Type>),
    /// A pointer that hand-written code understands.
    Ptr,
}

impl Type {
    /// The type of the C parameter, without what only the declaration says of it.
    pub fn in_c(&self) -> Type {
        match self {
            Type::Blocking => Type::Int("u32".into()),
            Type::Host(inner) => (**inner).clone(),
            Type::Data | Type::Shared(..) | Type::Properties(_) => Type::Ptr,
            other => other.clone(),
        }
    }
}

/// A named parameter or field.
#[derive(Clone, Debug)]
pub struct Param {
    pub name: String,
    pub ty: Type,
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the program.
    Reads,
    /// From the program to the device.
    Writes,
}

/// The kind of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// A property query.
    Info,
    /// A command in a queue.
    Enqueue,
    /// A command in a queue whose bytes pass through the window.
    Transfer(Direction),
    /// Creates a handle of this kind.
    Create(String),
    /// Returns a status.
    Call,
    /// Is not waited for: an error is kept for a later call that waits.
    Post,
    /// Counts a reference of the program to a handle.
    Retain,
    /// Gives a reference of the program up.
    Release,
    /// Never leaves the client.
    Local,
    /// Not supported.
    None,
}

/// A function of the runtime, and the parameters that it gets.
#[derive(Clone, Debug)]
pub struct Call {
    pub name: String,
    pub args: Vec<String>,
}

/// One declaration.
#[derive(Clone, Debug)]
pub struct Function {
    /// The number on the wire.
    pub id: u32,
    pub name: String,
    pub class: Class,
    pub flags: HashSet<String>,
    /// The parameters in C's order, without those that the class implies.
    pub params: Vec<Param>,
    /// The fields of the record, if they aren't the parameters.
    pub wire: Option<Vec<Param>>,
    /// Properties that the client answers, by name.
    pub local: Vec<String>,
    /// Properties of a query with the flag `cached` whose answers are not kept, by name.
    pub changing: Vec<String>,
    /// Checks before the native call.
    pub checks: Vec<Call>,
    /// The function of the server's runtime that tells the number of a transfer's bytes.
    pub packed: Option<Call>,
    /// The function of the client's runtime that finds a transfer's bytes in the program's memory.
    pub memory: Option<Call>,
    /// The type of the command in its event, by name.
    pub command: Option<String>,
    /// The version of the API in which it is first found under its name without a suffix; 0: the API has no versions.
    pub since: u32,
    /// Why it is not forwarded.
    pub absence: Option<Absence>,
    /// The line of the declaration.
    pub line: usize,
}

/// Why a function is not forwarded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absence {
    /// Set if it may come: nothing but work stands against it.
    pub later: bool,
    pub reason: String,
}

/// An exported name of an API whose functions have versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// As it is exported: `cuMemcpyHtoD_v2_ptds`.
    pub name: String,
    /// As programs ask for it: `cuMemcpyHtoD`.
    pub base: String,
    pub since: u32,
    /// Set if its default stream is the calling thread's.
    pub threaded: bool,
}

/// Returns whether a parameter travels in the record as it is.
fn travels(ty: &Type) -> bool {
    !matches!(ty, Type::Out(_) | Type::Ptr | Type::Data | Type::Host(_))
}

impl Function {
    /// Returns whether a flag is set.
    pub fn is(&self, flag: &str) -> bool {
        self.flags.contains(flag)
    }

    /// The suffix of its second export, whose default stream is the calling thread's.
    pub fn threaded(&self) -> Option<&'static str> {
        ["ptsz", "ptds"].into_iter().find(|suffix| self.is(suffix))
    }

    /// The names under which it is exported.
    pub fn symbols(&self) -> Vec<Symbol> {
        let versioned = self.name.trim_end_matches(|c: char| c.is_ascii_digit());
        let base = versioned.strip_suffix("_v").unwrap_or(&self.name).to_string();
        let plain = Symbol { name: self.name.clone(), base, since: self.since, threaded: false };
        let second = self.threaded().map(|suffix| Symbol {
            name: format!("{}_{suffix}", self.name),
            // Streams of threads came with version 7.
            since: self.since.max(7000),
            threaded: true,
            ..plain.clone()
        });
        [plain].into_iter().chain(second).collect()
    }

    /// Returns whether it puts a command into a queue, with a wait list and an event.
    pub fn is_command(&self) -> bool {
        matches!(self.class, Class::Enqueue | Class::Transfer(_))
    }

    /// Returns whether it has a record.
    pub fn on_wire(&self) -> bool {
        !matches!(self.class, Class::Local | Class::None | Class::Retain | Class::Release)
    }

    /// Returns whether it is in the native API (and not one of our own records).
    pub fn is_native(&self) -> bool {
        self.name.starts_with(|c: char| c.is_ascii_lowercase()) && !self.name.starts_with("tombolo")
    }

    /// The fields of its record, with those that the class implies.
    pub fn fields(&self) -> Vec<Param> {
        let implied = |name: &str, ty| Param { name: name.into(), ty };
        let u64s = || Type::Int("u64".into());
        let mut fields: Vec<Param> = match &self.wire {
            Some(wire) => wire.clone(),
            None => self.params.iter().filter(|p| travels(&p.ty)).cloned().collect(),
        };
        if matches!(self.class, Class::Transfer(_)) && self.wire.is_none() {
            fields.extend([implied("data", u64s()), implied("ticket", u64s())]);
        }
        if self.is("current") {
            fields.push(implied("current", Type::Handle("context".into(), true)));
        }
        match &self.class {
            Class::Info => fields.push(implied("param", Type::Int("u32".into()))),
            Class::Enqueue | Class::Transfer(_) => {
                fields.extend([
                    implied("waits", Type::Handles("event".into(), None)),
                    implied("event", u64s()),
                ]);
            }
            Class::Create(_) => fields.push(implied("new", u64s())),
            _ => {}
        }
        fields
    }
}

/// A kind of handle.
#[derive(Clone, Debug)]
pub struct Kind {
    /// The number on the wire.
    pub id: u32,
    pub name: String,
    /// The code for an invalid handle, by name.
    pub invalid: String,
}

/// A constant of the API.
#[derive(Clone, Debug)]
pub struct Constant {
    pub name: String,
    /// A Rust type.
    pub ty: String,
    pub value: i64,
}

/// A structure of the API, laid out as in C.
#[derive(Clone, Debug)]
pub struct Struct {
    pub name: String,
    /// Its size in C.
    pub size: usize,
    pub fields: Vec<Param>,
}

/// All declarations of an API.
#[derive(Clone, Debug, Default)]
pub struct Api {
    pub name: String,
    /// The prefix of its names in C, which is also the module of its constants: `cl`.
    pub prefix: String,
    /// The code for what isn't supported, by name.
    pub unsupported: String,
    /// The code for success, by name.
    pub success: String,
    /// The code for a lost device, by name.
    pub lost: String,
    pub constants: Vec<Constant>,
    pub structs: Vec<Struct>,
    pub kinds: Vec<Kind>,
    pub functions: Vec<Function>,
    /// Set if records have the calling thread's current context, except those of functions that are `free` of it, and all functions are exported.
    pub is_contextual: bool,
    /// The entries of the dispatch table.
    pub dispatch: Vec<String>,
    /// The identity of the text.
    pub identity: u128,
}

impl Api {
    /// The function of this name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.name == name)
    }

    /// The constant of this name.
    pub fn constant(&self, name: &str) -> Option<&Constant> {
        self.constants.iter().find(|c| c.name == name)
    }
}
