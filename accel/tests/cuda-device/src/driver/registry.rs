// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Handles. A handle is a number that no other object ever had, so that a stale or invented one is found out.

use super::{Code, Handle, Result, lock};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

static NEXT: AtomicUsize = AtomicUsize::new(0x10000);

/// A handle for a new object.
pub fn handle() -> Handle {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

pub struct Registry<T> {
    objects: LazyLock<Mutex<HashMap<Handle, Arc<T>>>>,
    /// The error for a handle that is not here.
    code: Code,
}

impl<T> Registry<T> {
    pub const fn new(code: Code) -> Registry<T> {
        Registry { objects: LazyLock::new(Mutex::default), code }
    }

    pub fn insert(&self, object: Arc<T>) -> Handle {
        let handle = handle();
        self.insert_as(handle, object);
        handle
    }

    pub fn insert_as(&self, handle: Handle, object: Arc<T>) {
        lock(&self.objects).insert(handle, object);
    }

    pub fn get(&self, handle: Handle) -> Result<Arc<T>> {
        lock(&self.objects).get(&handle).cloned().ok_or(self.code)
    }

    pub fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        lock(&self.objects).remove(&handle).ok_or(self.code)
    }

    pub fn all(&self) -> Vec<(Handle, Arc<T>)> {
        lock(&self.objects).iter().map(|(&handle, object)| (handle, object.clone())).collect()
    }
}
