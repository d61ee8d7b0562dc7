// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Values that the runtime keeps with a context, by a key of its own.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Called with context, key and value when the context ends.
pub type Destructor = unsafe extern "C" fn(usize, usize, usize);

type Values = HashMap<(usize, usize), (usize, Option<Destructor>)>;

static VALUES: Mutex<Option<Values>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Values) -> T) -> T {
    f(VALUES.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Keeps a value.
pub fn put(context: usize, key: usize, value: usize, destructor: Option<Destructor>) {
    with(|values| values.insert((context, key), (value, destructor)));
}

/// The value kept.
pub fn get(context: usize, key: usize) -> Option<usize> {
    with(|values| values.get(&(context, key)).map(|v| v.0))
}

/// Forgets a value. `false`: there was none.
pub fn delete(context: usize, key: usize) -> bool {
    with(|values| values.remove(&(context, key))).is_some()
}

/// A context has ended: forgets its values, after its runtime was told.
pub fn end(context: usize) {
    let mine: Vec<_> = with(|values| {
        let keys: Vec<_> = values.keys().filter(|k| k.0 == context).copied().collect();
        keys.into_iter().filter_map(|key| values.remove(&key).map(|value| (key.1, value))).collect()
    });
    for (key, (value, destructor)) in mine {
        if let Some(destructor) = destructor {
            // SAFETY: the runtime registered this function for this moment. No lock is held: it may come back here.
            unsafe { destructor(context, key, value) };
        }
    }
}
