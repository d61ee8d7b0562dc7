// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The C functions, by subject. Each names the version at which cuGetProcAddress has it under its name without a suffix; a second name is the function whose default
//! stream is the calling thread's.

#![allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "C programs call these functions, with pointers as the API says"
)]

use super::{INVALID_VALUE, Result, UNKNOWN, array, put};

pub(in crate::driver) fn call(body: impl FnOnce() -> Result) -> i32 {
    // A panic must not cross into C.
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    }
}

macro_rules! api {
    ($($since:literal $name:ident $(/ $own:ident)? : $arguments:tt $body:block)*) => {
        $(
            function! { $name $arguments $body }
            $(own_default! { $own $name $arguments })?
        )*
        /// Name, version and address of every function.
        pub fn symbols() -> Vec<(&'static str, i32, usize)> {
            vec![$((stringify!($name), $since, $name as *const () as usize), $((stringify!($own), $since, $own as *const () as usize),)?)*]
        }
    };
}

macro_rules! function {
    ($name:ident ($($arg:ident: $ty:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> i32 {
            $crate::driver::exports::call(|| $body)
        }
    };
}

macro_rules! own_default {
    ($own:ident $name:ident ($($arg:ident: $ty:ty),*)) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $own($($arg: $ty),*) -> i32 {
            $crate::driver::stream::with_own_default(|| $name($($arg),*))
        }
    };
}

mod copies;
mod device;
mod graphs;
mod memory;
mod module;
mod streams;

pub use device::cuDevicePrimaryCtxRetain;
pub use module::cuModuleLoadData;

/// Name, version and address of every function.
pub fn symbols() -> Vec<(&'static str, i32, usize)> {
    let all = [
        device::symbols(),
        module::symbols(),
        memory::symbols(),
        copies::symbols(),
        streams::symbols(),
        graphs::symbols(),
    ];
    all.concat()
}

/// Copies a list to an array of the caller; the count goes in as room and comes out as what there is.
fn list<T: std::marker::Copy>(values: &[T], to: *mut T, count: *mut usize) -> Result {
    let room = array(count, 1).first().copied().ok_or(INVALID_VALUE)?;
    if !to.is_null() {
        for (at, &value) in values.iter().enumerate().take(room) {
            put(to.wrapping_add(at), value)?;
        }
    }
    put(count, if to.is_null() { values.len() } else { values.len().min(room) })
}

fn words<const N: usize>(from: *const u64) -> Result<[u64; N]> {
    array(from, N).try_into().map_err(|_| INVALID_VALUE)
}

fn call_code(code: i32) -> Result {
    if code == 0 { Ok(()) } else { Err(code) }
}
