// Expose C++ functions as functions of a Python module. Parameters are numbers, addresses and structures of these. Only
// Python's limited API is used, so one binary serves CPython 3.10 and all later versions.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace raoe::python {

// Thrown if Python has already set an error.
struct Raised {};

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

template <class T>
struct Of {};

template <class T>
T read(PyObject* value, Of<T>) {
  T got;
  if constexpr (std::is_same_v<T, bool>) {
    got = PyObject_IsTrue(value) == 1;
  } else if constexpr (std::is_floating_point_v<T>) {
    got = static_cast<T>(PyFloat_AsDouble(value));
  } else if constexpr (std::is_pointer_v<T>) {
    got = static_cast<T>(PyLong_AsVoidPtr(value));
  } else {
    got = static_cast<T>(PyLong_AsLongLong(value));
  }
  if (PyErr_Occurred()) throw Raised();
  return got;
}

inline std::vector<std::int64_t> read(PyObject* value, Of<std::vector<std::int64_t>>) {
  const Py_ssize_t size = PyTuple_Size(value);
  if (size < 0) throw Raised();
  std::vector<std::int64_t> all(static_cast<std::size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) all[i] = read(PyTuple_GetItem(value, i), Of<std::int64_t>());
  return all;
}

// Iterator over the arguments of a call, from left to right.
struct Values {
  PyObject* const* next;
  template <class T>
  operator T() {
    return read(*next++, Of<T>());
  }
};

struct Anything {
  template <class T>
  operator T() const;
};

// Number of Python arguments of a parameter: one, or for a structure the number of its fields.
template <class T, class Void, class... Taken>
inline constexpr std::size_t fields = sizeof...(Taken) - 1;
template <class T, class... Taken>
inline constexpr std::size_t fields<T, std::void_t<decltype(T{Taken{}...})>, Taken...> =
    fields<T, void, Taken..., Anything>;
template <class T>
constexpr std::size_t width() {
  if constexpr (std::is_aggregate_v<T>) {
    return fields<T, void>;
  } else {
    return 1;
  }
}

template <class T, std::size_t... I>
T take(Values& values, std::index_sequence<I...>) {
  if constexpr (std::is_aggregate_v<T>) {
    return T{(static_cast<void>(I), values)...};  // braces guarantee evaluation from left to right
  } else {
    return read(*values.next++, Of<T>());
  }
}

inline PyObject* give(std::size_t number) { return PyLong_FromSize_t(number); }
inline PyObject* give(const char* text) { return PyUnicode_FromString(text); }

template <auto function, class Result, class... Taken>
PyObject* call(PyObject* const* given, Py_ssize_t count, Result (*)(Taken...)) {
  constexpr std::size_t wanted = (0 + ... + width<std::decay_t<Taken>>());
  if (static_cast<std::size_t>(count) != wanted) {
    const std::string text = "expected " + std::to_string(wanted) + " arguments, got " + std::to_string(count);
    PyErr_SetString(PyExc_TypeError, text.c_str());
    return nullptr;
  }
  try {
    [[maybe_unused]] Values values{given};
    std::tuple<std::decay_t<Taken>...> taken{
        take<std::decay_t<Taken>>(values, std::make_index_sequence<width<std::decay_t<Taken>>()>())...};
    if constexpr (std::is_void_v<Result>) {
      {
        const WithoutGil released;
        std::apply(function, taken);
      }
      Py_RETURN_NONE;
    } else {
      return give(std::apply(function, taken));
    }
  } catch (const Raised&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <auto function>
PyMethodDef method(const char* name) {
  PyObject* (*const called)(PyObject*, PyObject* const*, Py_ssize_t) = [](PyObject*, PyObject* const* given,
                                                                          Py_ssize_t count) {
    return call<function>(given, count, function);
  };
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called)), METH_FASTCALL, nullptr};
}

// Create the only module of a binary.
template <class... Method>
PyObject* module(const char* name, Method... each) {
  static PyMethodDef methods[] = {each..., {}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}

}  // namespace raoe::python
